"""Which configs are worth confirming, most important first."""

from __future__ import annotations

from collections.abc import Sequence

from autocompile.records import State
from autocompile.search.canonical import canonical, key, without_compile
from autocompile.search.history import History, Score
from autocompile.search.lessons import reason_against
from autocompile.space import Config
from autocompile.spec import Paired

_NOISE = 0.01  # standard deviation between processes of one config; 0.3 to 1.5 % were seen on an H200
_HOPELESS = 5 * _NOISE  # slower than the best by more: not worth a confirmation
_MOST_FINALISTS = 3


def finalists(history: History) -> list[Score]:
    """The best compiled configs by their search values; in a space without any the best two eager ones."""
    compiled = [score for score in history.searched if not score.eager]
    best = compiled[:_MOST_FINALISTS] or list(history.searched[:2])
    return [score for score in best if score.objective >= (1 - _HOPELESS) * best[0].objective]


def lineup(history: History) -> list[Config]:
    """What blocks of confirmations hold as far as time goes: the best, eager at its own best, the same without
    compile, what the user runs today, then the other finalists likewise. Empty where there is nothing to compare."""
    plan = history.spec.plan
    if isinstance(plan, Paired):
        return [canonical(config) for config in plan.configs if not history.spoiled(key(config))]
    best = [score.config for score in finalists(history)]
    eager = [score.config for score in history.searched if score.eager][:1]
    today = [history.spec.against] if history.spec.against else []
    turns = [*best[:1], *eager, *today]
    for config in best:
        turns += [config, without_compile(config)]
    distinct = _distinct(turns)
    able = [config for config in distinct if not history.spoiled(key(config)) and _may_run(history, config)]
    return able if len(able) > 1 else []


def _may_run(history: History, config: Config) -> bool:
    """It was measured, or was not tried and nothing speaks against it."""
    attempts = history.trials.get(key(config), [])
    return attempts[-1].state is State.COMPLETE if attempts else reason_against(history.lessons, config) is None


def _distinct(configs: Sequence[Config]) -> list[Config]:
    return list({key(config): canonical(config) for config in configs}.values())
