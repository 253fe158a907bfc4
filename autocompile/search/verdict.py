"""What the study says: whether compile wins over eager, by how much, and after how many steps it has paid back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autocompile.records import Result, State, TrialRecord, Verdict
from autocompile.search.canonical import Key, is_eager, key, without_compile
from autocompile.search.history import History, Score
from autocompile.search.known_good import plain_compile
from autocompile.search.rounds import PROCESS_ALLOWANCE, settled, simplest
from autocompile.spec import Facts, Paired, StudySpec

_LEAST_WIN = 1.01


def verdict(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord]) -> Verdict:
    """Confirmations alone decide where a round is complete; else the search's own values, provisionally."""
    history = History(spec, facts, tuple(records))
    round_scores = settled(history)
    provisional = history.confirmed if isinstance(spec.plan, Paired) else history.searched
    scores = provisional if round_scores is None else round_scores
    eager = next((score for score in scores if score.eager), None)
    compiled = simplest(history, [score for score in scores if not score.eager])
    result = _result(history, compiled, eager)
    chosen = compiled if result is Result.WIN else eager or compiled
    if chosen is None:
        return Verdict(result=Result.NONE, confirmed=False)
    ratio = _ratio(compiled, eager)
    by_key = {score.key: score for score in scores}
    same_eager = by_key.get(key(without_compile(compiled.config))) if compiled else None
    return Verdict(
        result=result,
        confirmed=round_scores is not None,
        config=dict(chosen.config),
        tokens_per_second=chosen.measurement.tokens_per_second,
        speedup=_ratio(compiled, same_eager),
        speedup_vs_best_eager=ratio,
        speedup_low=ratio and ratio * (1 - PROCESS_ALLOWANCE),
        speedup_high=ratio and ratio * (1 + PROCESS_ALLOWANCE),
        speedup_vs_plain_compile=_over_plain(history, compiled, by_key),
        break_even_steps=_break_even_steps(history, compiled, same_eager or eager),
        confirmed_by=tuple(sorted(score.record.number for score in round_scores or ())),
    )


def _result(history: History, compiled: Score | None, eager: Score | None) -> Result:
    """Compiled training where eager was tried and does not even fit is a win without a ratio."""
    ratio = _ratio(compiled, eager)
    if ratio is None:
        eager_tried = any(is_eager(record.config) and _ended(record) for record in history.records)
        return Result.WIN if compiled and eager_tried else Result.TIE if compiled or eager else Result.NONE
    if ratio * (1 - PROCESS_ALLOWANCE) > 1 and ratio > _LEAST_WIN:
        return Result.WIN
    return Result.LOSS if ratio * (1 + PROCESS_ALLOWANCE) < 1 else Result.TIE


def _ended(record: TrialRecord) -> bool:
    return record.state in (State.COMPLETE, State.PRUNED)


def _ratio(compiled: Score | None, other: Score | None) -> float | None:
    return compiled.objective / other.objective if compiled and other else None


def _over_plain(history: History, compiled: Score | None, by_key: dict[Key, Score]) -> float | None:
    config = plain_compile(history)
    if config is None or compiled is None:
        return None
    if compiled.key == key(config):
        return 1.0
    if key(config) in by_key:
        return _ratio(compiled, by_key[key(config)])
    attempts = [record for record in history.trials.get(key(config), []) if record.measurement]
    return _ratio(compiled, Score(history.objective(attempts[-1]), attempts[-1])) if attempts else None


def _break_even_steps(history: History, compiled: Score | None, eager: Score | None) -> int | None:
    """Optimizer steps of the compiled config until its cold compile is earned, eager training the same tokens."""
    if compiled is None or eager is None:
        return None
    step_seconds = compiled.measurement.step_seconds.median
    tokens_per_step = compiled.measurement.tokens_per_second * step_seconds
    saved = tokens_per_step / eager.measurement.tokens_per_second - step_seconds
    return math.ceil(history.cold_seconds[compiled.key] / saved) if saved > 0 else None
