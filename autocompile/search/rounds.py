"""The round of confirmations that a verdict rests on: which configs, in which order, and whether it is complete."""

from __future__ import annotations

from collections.abc import Sequence

from autocompile.search.canonical import Key, canonical, key, starting_point, without_compile
from autocompile.search.history import History, Score, is_over
from autocompile.search.lessons import reason_against
from autocompile.space import Config
from autocompile.spec import Paired, Role

# Two processes of one config differ by up to some percent, however exact the window of each looks. A fixed
# allowance on a ratio until repeated blocks measure the real spread.
PROCESS_ALLOWANCE = 0.03
_HOPELESS = 5 * PROCESS_ALLOWANCE  # slower than the best by more: not worth a confirmation


def finalists(history: History) -> list[Score]:
    """The best two compiled configs by their search values, or the best two of all where none is compiled."""
    compiled = [score for score in history.searched if not score.eager]
    best = (compiled or list(history.searched))[:2]
    return [score for score in best if score.objective >= (1 - _HOPELESS) * best[0].objective]


def required(history: History) -> tuple[Config, ...]:
    """What a complete round confirms, finalists and the best eager in turns; empty where nothing can be compared."""
    if isinstance(history.spec.plan, Paired):
        return _distinct(history.spec.plan.configs)
    eager = [score.config for score in history.searched if score.eager][:1]
    best = [score.config for score in finalists(history)]
    turns = _distinct([*best[:1], *eager, *best[1:]])
    return turns if len(turns) > 1 else ()


def missing(history: History) -> list[Config]:
    return [config for config in required(history) if not is_over(history.confirmations.get(key(config), []))]


def missing_eager(history: History) -> Config | None:
    """Eager with the other knobs of the best confirmed config, unless it was tried or cannot run."""
    best = simplest(history, [score for score in history.confirmed if not score.eager])
    if best is None or isinstance(history.spec.plan, Paired):
        return None
    eager = without_compile(best.config)
    over = is_over(history.confirmations.get(key(eager), []))
    return None if over or reason_against(history.lessons, eager) else eager


def simplest(history: History, scores: Sequence[Score]) -> Score | None:
    """The best, or one within the allowance of it that departs from fewer defaults."""
    if not scores:
        return None
    defaults = starting_point(history.spec, history.facts)
    limit = (1 - PROCESS_ALLOWANCE) * max(score.objective for score in scores)
    equal = [score for score in scores if score.objective >= limit]
    return min(equal, key=lambda score: (_departures(score.key, key(defaults)), -score.objective))


def settled(history: History) -> tuple[Score, ...] | None:
    """The scores of the last complete round; None where none is. Later search does not undo an earlier round."""
    if _complete(history):
        return history.confirmed
    ends = [record.number for record in history.records if record.role is Role.CONFIRM]
    for end in sorted(ends, reverse=True):
        until = tuple(record for record in history.records if record.number <= end)
        earlier = History(history.spec, history.facts, until)
        if _complete(earlier):
            return earlier.confirmed
    return None


def _complete(history: History) -> bool:
    return bool(required(history)) and not missing(history)


def _distinct(configs: Sequence[Config]) -> tuple[Config, ...]:
    return tuple({key(config): canonical(config) for config in configs}.values())


def _departures(config: Key, defaults: Key) -> int:
    return sum(value != default for value, default in zip(config, defaults, strict=True))
