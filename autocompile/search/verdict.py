"""What the study says: whether compile wins over eager, by how much, and after how many steps it has paid back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from autocompile.records import Result, State, TrialRecord, Verdict
from autocompile.search.blocks import Arm
from autocompile.search.canonical import is_eager, key, without_compile
from autocompile.search.history import History, Score, history_of
from autocompile.search.judging import LEAST_WIN, Judgement, judge, kept, log_ratios, sides, simplest
from autocompile.search.known_good import plain_compile, unmeasured
from autocompile.search.planned_runs import by_length
from autocompile.spec import Facts, Search, StudySpec

# Between single processes, where no blocks have measured their spread, and for the best of several having been lucky:
# 225 to 253 ms were seen of one eager config on one GPU (studies/h200-llama2-7b-lora-b4)
_ALLOWANCE = math.log(1.10)


def verdict(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord]) -> Verdict:
    """Confirmations alone decide where there are enough blocks; else the search's own values, provisionally."""
    history = history_of(spec, facts, tuple(records))
    judged = judge(history)
    case = _provisional(history) if judged is None else _confirmed(history, judged)
    result = _result(history, case)
    chosen = case.rival if result is Result.WIN else case.reference or case.rival
    if chosen is None:
        return _last_resort(history)
    return Verdict(
        result=result,
        confirmed=judged is not None,
        config=dict(chosen.config),
        tokens_per_second=history.sustained_speed(chosen.key) or case.tokens_per_second(chosen),
        speedup=case.speedup,
        speedup_vs_best_eager=case.ratio,
        speedup_low=case.low,
        speedup_high=case.high,
        speedup_vs_plain_compile=_over_plain(history, case),
        speedup_over_against=_over_against(history, case, chosen),
        break_even_steps=_break_even_steps(history, case.rival, case.same or case.reference),
        confirmed_by=tuple(sorted(case.numbers)),
        rounds=case.rounds,
        by_length=by_length(history, chosen),
        unmeasured=tuple(map(dict, unmeasured(history))) if isinstance(spec.plan, Search) else (),
    )


def _last_resort(history: History) -> Verdict:
    """Where nothing may win, eager that was measured with little memory left is still how one can train."""
    eager = [r for r in history.ordered if r.state is State.COMPLETE and is_eager(r.config) and r.measurement]
    if not eager:
        return Verdict(result=Result.NONE, confirmed=False)
    best = max(eager, key=history.objective)
    speed = best.measurement.tokens_per_second if best.measurement else None
    return Verdict(result=Result.TIE, confirmed=False, config=dict(best.config), tokens_per_second=speed)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Compile against eager: one score that stands for each, the ratio of the objectives, and its interval."""

    rival: Score | None
    reference: Score | None
    same: Score | None  # the rival's other knobs without compile
    ratio: float | None
    low: float | None
    high: float | None
    speedup: float | None
    runs: tuple[Score, ...] = ()  # the confirmations that count
    rounds: int = 0

    @property
    def numbers(self) -> set[int]:
        return {score.record.number for score in self.runs}

    def tokens_per_second(self, chosen: Score) -> float:
        """The geometric mean over its confirmations."""
        speeds = [run.measurement.tokens_per_second for run in self.runs if run.key == chosen.key]
        speeds = speeds or [chosen.measurement.tokens_per_second]
        return geometric_mean(speeds)


def _confirmed(history: History, judged: Judgement) -> _Case:
    ratio, same = judged.ratio, _same(history, judged)
    rivals, references, sames = (
        [] if arm is None else kept(history, arm) for arm in (judged.rival, judged.reference, same)
    )
    speedups = log_ratios(history, judged.rival, same) if judged.rival and same else []
    return _Case(
        rival=rivals[-1] if rivals else None,
        reference=references[-1] if references else None,
        same=sames[-1] if sames else None,
        ratio=math.exp(ratio.mean) if ratio else None,
        low=math.exp(ratio.low) if ratio else None,
        high=math.exp(ratio.high) if ratio else None,
        speedup=math.exp(fmean(speedups)) if speedups else None,
        runs=tuple(score for arm in _arms(history) for score in kept(history, arm)),
        rounds=ratio.n if ratio else len(references or rivals),
    )


def _provisional(history: History) -> _Case:
    """By single measurements; in a paired plan by each config's last confirmation."""
    scores = history.searched or history.confirmed
    by_arm = {(score.key, 0): score for score in scores}
    rivals, references = sides(history.spec.plan, list(by_arm))
    reference = next((by_arm[arm] for arm in references), None)
    rival = simplest(history, [by_arm[arm] for arm in rivals])
    same = next((score for score in scores if rival and score.key == key(without_compile(rival.config))), None)
    ratio = rival.objective / reference.objective if rival and reference else None
    return _Case(
        rival=rival,
        reference=reference,
        same=same,
        ratio=ratio,
        low=ratio and ratio * math.exp(-_ALLOWANCE) * _least(rival) / _most(reference),
        high=ratio and ratio * math.exp(_ALLOWANCE) * _most(rival) / _least(reference),
        speedup=rival.objective / same.objective if rival and same else None,
    )


def _least(score: Score | None) -> float:
    """How much slower than its median a window may have been, by that median's own interval."""
    return 1.0 if score is None else score.measurement.step_seconds.median / score.measurement.step_seconds.high


def _most(score: Score | None) -> float:
    return 1.0 if score is None else score.measurement.step_seconds.median / score.measurement.step_seconds.low


def _same(history: History, judged: Judgement) -> Arm | None:
    """The arm with the rival's other knobs and nothing compiled."""
    arms = _arms(history)
    if judged.rival is None:
        return None
    plain = key(without_compile(arms[judged.rival].config))
    return next((arm for arm in arms if arm[0] == plain), None)


def _arms(history: History) -> dict[Arm, TrialRecord]:
    """All that were confirmed and have not failed since, each with its last record."""
    arms = {arm: record for block in history.blocks for arm, record in block.arms.items()}
    return {arm: record for arm, record in arms.items() if not history.spoiled(arm[0])}


def _result(history: History, case: _Case) -> Result:
    """Compiled training where eager was tried and does not even fit is a win without a ratio."""
    if case.ratio is None or case.low is None or case.high is None:
        eager_tried = any(is_eager(record.config) and _ended(record) for record in history.records)
        compiled_alone = case.rival is not None and eager_tried and not history.eager_ran
        return Result.WIN if compiled_alone else Result.TIE if case.rival or case.reference else Result.NONE
    if case.low > 1 and case.ratio > LEAST_WIN:
        return Result.WIN
    return Result.LOSS if case.high < 1 else Result.TIE


def _ended(record: TrialRecord) -> bool:
    return record.state in (State.COMPLETE, State.PRUNED)


def _over_plain(history: History, case: _Case) -> float | None:
    """By search slices on both sides: plain compile is not confirmed."""
    config = plain_compile(history)
    if config is None or case.rival is None:
        return None
    if case.rival.key == key(config):
        return 1.0
    plain, own = (
        [record for record in history.trials.get(name, []) if record.measurement]
        for name in (key(config), case.rival.key)
    )
    return history.objective(own[-1]) / history.objective(plain[-1]) if plain and own else None


def _over_against(history: History, case: _Case, chosen: Score) -> float | None:
    """By confirmations of both where there are any, else by the search's."""
    if history.spec.against is None:
        return None
    today = key(history.spec.against)
    if chosen.key == today:
        return 1.0
    runs = {name: [run.objective for run in case.runs if run.key == name] for name in (chosen.key, today)}
    if all(runs.values()):
        return geometric_mean(runs[chosen.key]) / geometric_mean(runs[today])
    own, theirs = history.values.get(chosen.key), history.values.get(today)
    return own / theirs if own and theirs else None


def _break_even_steps(history: History, compiled: Score | None, eager: Score | None) -> int | None:
    """Optimizer steps of the compiled config until its cold compile is earned, eager training the same tokens."""
    if compiled is None or eager is None:
        return None
    step_seconds = compiled.measurement.step_seconds.median
    tokens_per_step = compiled.measurement.tokens_per_second * step_seconds
    saved = tokens_per_step / eager.measurement.tokens_per_second - step_seconds
    return math.ceil(history.cold_seconds[compiled.key] / saved) if saved > 0 else None
