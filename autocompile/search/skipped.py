"""What needed no slice, and why: configs that a failure elsewhere or a pair known to fail ruled out."""

from __future__ import annotations

from collections.abc import Sequence

from autocompile.records import Derived, TrialRecord
from autocompile.search.canonical import candidates, canonical, key, known_to_fail
from autocompile.search.history import History, history_of
from autocompile.search.known_good import first_compiled, plain_compile
from autocompile.search.lessons import reason_against
from autocompile.space import Config
from autocompile.spec import Facts, StudySpec

_SHORT = 20  # in a small space all are listed, in a large one those that every study would have tried


def derived(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord]) -> list[Derived]:
    """Known-good configs and baselines that were skipped, and the rest of the space where the list stays short."""
    history = history_of(spec, facts, tuple(records))
    plain = plain_compile(history)
    expected = [*first_compiled(history), *([plain] if plain else [])]
    usual = {key(config): found for config in expected if (found := _skipped(history, config, warned=True))}
    others = {key(config): found for config in candidates(spec, facts) if (found := _skipped(history, config))}
    return list({**usual, **others}.values()) if len(others) <= _SHORT else list(usual.values())


def _skipped(history: History, config: Config, *, warned: bool = False) -> Derived | None:
    """``warned``: a pair known to fail was not even tried where this config would have been."""
    if key(config) in history.trials:
        return None
    reason = reason_against(history.lessons, config)
    pair = known_to_fail(config) if warned else None
    if reason is None and pair is not None:
        reason = f"{pair} is known to fail, so it comes last"
    return Derived(config=canonical(config), source="skipped", reason=reason) if reason else None
