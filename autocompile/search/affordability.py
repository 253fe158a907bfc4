"""What still fits into the budget once the time for one round of confirmations is kept back."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from autocompile.search.canonical import candidates, eager_twin, in_space, is_eager, key
from autocompile.search.cost import compile_seconds, confirm_seconds, slice_seconds
from autocompile.search.history import History
from autocompile.search.lessons import against
from autocompile.search.rounds import finalists
from autocompile.space import Config
from autocompile.spec import Role, StudySpec

_LONGEST_COMPILE_SECONDS = 900.0
_ROUND_SLACK = 1.1
_ROUND_SLACK_SECONDS = 5.0


def left_seconds(spec: StudySpec, seconds_used: float) -> float:
    return math.inf if spec.budget.seconds is None else spec.budget.seconds - seconds_used


def reserve_seconds(history: History, starting: Config | None = None) -> float:
    """Time of one round if what runs, and the config about to start, prove the best.

    Nothing is kept back before a first compiled config was measured: there would be nothing to confirm.
    """
    known = history.costs
    best: list[Config] = [score.config for score in finalists(history)]
    if not best or (is_eager(best[0]) and _compiles(history)):
        return 0.0
    coming: list[Config] = [record.config for record in history.running if record.role is not Role.CONFIRM]
    coming += [starting] if starting is not None and in_space(history.spec, history.facts, starting) else []
    rivals = best + [config for config in coming if is_eager(config) == is_eager(best[0])]
    longest = sorted(rivals, key=lambda config: confirm_seconds(known, config))[-2:]
    seconds = sum(confirm_seconds(known, config) for config in longest)
    if not is_eager(best[0]):
        eager: list[Config] = [score.config for score in history.searched if score.eager][:1]
        eager += [config for config in coming if is_eager(config)]
        twins = [twin for config in longest if (twin := eager_twin(config)) not in eager]
        seconds += max((confirm_seconds(known, config) for config in eager), default=0.0)
        seconds += max((confirm_seconds(known, config) for config in twins), default=0.0)
    return seconds * _ROUND_SLACK + _ROUND_SLACK_SECONDS


def compile_deadline_seconds(history: History, left: float) -> float:
    """How long a search slice may take to its first step."""
    return max(0.0, min(_LONGEST_COMPILE_SECONDS, left - reserve_seconds(history)))


def is_open(history: History, config: Config) -> bool:
    """Neither tried nor pointless."""
    return key(config) not in history.trials and against(history.lessons, config) is None


def fits(history: History, left: float, config: Config) -> bool:
    """Whether a search slice ends before the time kept back begins; as long as nothing was measured, any may try."""
    if not history.costs.measured:
        return left > 0
    return slice_seconds(history.costs, config) + reserve_seconds(history, config) <= left


def affordable(history: History, left: float) -> Callable[[Config], bool]:
    """Fits, and does not spend more than a third of the deadline on compiling while cheaper ones are untried."""
    third = compile_deadline_seconds(history, left) / 3

    @cache
    def cheapest() -> float:
        untried = (config for config in candidates(history.spec, history.facts) if is_open(history, config))
        seconds = (compile_seconds(history.costs, config) for config in untried if fits(history, left, config))
        return min(seconds, default=math.inf)

    def answer(config: Config) -> bool:
        if not fits(history, left, config):
            return False
        seconds = compile_seconds(history.costs, config)
        return seconds <= third or seconds <= cheapest()

    return answer


def _compiles(history: History) -> bool:
    return any(not is_eager(config) for config in candidates(history.spec, history.facts))
