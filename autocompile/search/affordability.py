"""What still fits into the budget once the time for one round of confirmations is kept back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autocompile.search.canonical import candidates, compiled_scopes, in_space, is_eager, key, without_compile
from autocompile.search.cost import compile_seconds, confirm_seconds, slice_seconds
from autocompile.search.history import History
from autocompile.search.lessons import reason_against
from autocompile.search.rounds import finalists
from autocompile.space import Config
from autocompile.spec import Role, StudySpec

_LONGEST_COMPILE_SECONDS = 900.0
_LONGEST_COMPILE_SHARE = 1 / 3
_ROUND_SLACK = 1.05
_ROUND_SLACK_SECONDS = 5.0


def left_seconds(spec: StudySpec, seconds_used: float) -> float:
    return math.inf if spec.budget.seconds is None else spec.budget.seconds - seconds_used


@dataclass(frozen=True)
class Means:
    """What a study can still afford: its history, and the seconds left of its budget."""

    history: History
    left: float

    def fits(self, config: Config) -> bool:
        """Whether a search slice ends before the time kept back; as long as nothing was measured, any may try."""
        if not self.history.costs.measured:
            return self.left > 0
        return slice_seconds(self.history.costs, config) + self.reserve_seconds(config) <= self.left

    def pays(self, config: Config) -> bool:
        """Fits, and spends at most a third of the deadline on compiling while cheaper ones are untried."""
        if not self.fits(config):
            return False
        seconds = compile_seconds(self.history.costs, config)
        return seconds <= self.compile_deadline_seconds * _LONGEST_COMPILE_SHARE or seconds <= self._cheapest_compile

    @cached_property
    def compile_deadline_seconds(self) -> float:
        """How long a search slice may take to its first step."""
        return max(0.0, min(_LONGEST_COMPILE_SECONDS, self.left - self.reserve_seconds()))

    def reserve_seconds(self, starting: Config | None = None) -> float:
        """Time of one round if what runs, and the config about to start, prove the best.

        Nothing is kept back before a first compiled config was measured: there would be nothing to confirm.
        """
        if not self._finalists:
            return 0.0
        rivals, eager = list(self._rivals), self._eager_seconds
        if starting is not None and in_space(self.history.spec, self.history.facts, starting):
            if is_eager(starting):
                eager = max(eager, confirm_seconds(self.history.costs, starting))
            else:
                rivals.append(self._rival(starting))
        longest = sorted(rivals, reverse=True)[:2]
        seconds = sum(own for own, _ in longest) + eager + max((extra for _, extra in longest), default=0.0)
        return seconds * _ROUND_SLACK + _ROUND_SLACK_SECONDS

    @cached_property
    def _finalists(self) -> list[Config]:
        best = [score.config for score in finalists(self.history)]
        compiles = bool(compiled_scopes(self.history.spec, self.history.facts))
        return [] if compiles and all(is_eager(config) for config in best) else best

    @cached_property
    def _coming(self) -> list[Config]:
        return [record.config for record in self.history.running if record.role is not Role.CONFIRM]

    @cached_property
    def _eager(self) -> list[Config]:
        return [score.config for score in self.history.searched if score.eager][:1]

    @cached_property
    def _eager_seconds(self) -> float:
        """Of eager's turns: its best one, and in a space without compile the second best."""
        known = self.history.costs
        seconds = [confirm_seconds(known, config) for config in (*self._eager, *self._coming) if is_eager(config)]
        second = [confirm_seconds(known, config) for config in self._finalists[1:] if is_eager(config)]
        return max(seconds, default=0.0) + sum(second)

    @cached_property
    def _rivals(self) -> list[tuple[float, float]]:
        return [self._rival(config) for config in (*self._finalists, *self._coming) if not is_eager(config)]

    def _rival(self, config: Config) -> tuple[float, float]:
        """Seconds of this compiled config's turn, and of the same without compile where that has no turn of its own."""
        plain = without_compile(config)
        extra = 0.0 if plain in self._eager else confirm_seconds(self.history.costs, plain)
        return confirm_seconds(self.history.costs, config), extra

    @cached_property
    def _cheapest_compile(self) -> float:
        """Of all that is untried and fits."""
        space = candidates(self.history.spec, self.history.facts)
        return min(
            (
                compile_seconds(self.history.costs, config)
                for config in space
                if is_open(self.history, config) and self.fits(config)
            ),
            default=math.inf,
        )


def is_open(history: History, config: Config) -> bool:
    """Neither tried nor pointless."""
    return key(config) not in history.trials and reason_against(history.lessons, config) is None
