"""What still fits into the budget once the time for confirmations is kept back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autocompile.search.blocks import DROPPED_BLOCKS
from autocompile.search.canonical import compiled_scopes, in_space, is_eager, key, without_compile
from autocompile.search.cost import (
    by_compiler,
    compile_seconds,
    confirm_seconds,
    first_confirm_seconds,
    slice_seconds,
)
from autocompile.search.finalists import finalists
from autocompile.search.history import History
from autocompile.search.lessons import reason_against
from autocompile.slice_plan import SUSTAINED_SLICE
from autocompile.space import Config
from autocompile.spec import Role, Search, StudySpec

_LONGEST_COMPILE_SECONDS = 900.0
_LONGEST_COMPILE_SHARE = 1 / 3
LEAST_ROUNDS = 5  # of confirmations that count, where the budget holds them
FEWEST_BLOCKS = 2  # have a spread
_USUAL_BLOCKS = 3
_CONFIRM_SHARE = 0.5  # of the budget
_SLACK_SECONDS = 5.0
_MINUTE_SECONDS = SUSTAINED_SLICE.window_seconds  # on top of a confirmation, whose own window may end at once


def left_seconds(spec: StudySpec, seconds_used: float) -> float:
    return math.inf if spec.budget.seconds is None else spec.budget.seconds - seconds_used


@dataclass(frozen=True)
class Means:
    """What a study can still afford: its history, and the seconds left of its budget."""

    history: History
    left: float

    def fits(self, config: Config, *, owed: bool = False) -> bool:
        """Whether a search slice ends before the time kept back, which is less for one that the verdict owes.

        As long as nothing was measured, any may try, but none again in less time than it had before.
        """
        if not self.history.costs.measured:
            return self.left > self.history.costs.at_least.get(key(config), 0.0)
        return slice_seconds(self.history.costs, config) + self.reserve_seconds(config, owed=owed) <= self.left

    def ends_in_time(self, config: Config) -> bool:
        """With nothing kept for confirmations."""
        return slice_seconds(self.history.costs, config) + _SLACK_SECONDS <= self.left

    def fits_with_eager(self, config: Config) -> bool:
        """Whether also the same training without compile fits, which its speed would have to be compared with."""
        plain = without_compile(config)
        if not self.history.costs.measured or key(plain) in self.history.trials:
            return self.fits(config)
        longer = slice_seconds(self.history.costs, config) + slice_seconds(self.history.costs, plain)
        return longer + self.reserve_seconds(config) <= self.left

    def pays(self, config: Config) -> bool:
        """Fits, and spends at most a third of the deadline on compiling while cheaper ones are untried."""
        if not self.fits(config):
            return False
        seconds = compile_seconds(self.history.costs, config)
        return seconds <= self.compile_deadline_seconds() * _LONGEST_COMPILE_SHARE or seconds <= self._cheapest_compile

    def compile_deadline_seconds(self, *, owed: bool = False) -> float:
        """How long a search slice may take to its first step."""
        return max(0.0, min(_LONGEST_COMPILE_SECONDS, self.left - self.reserve_seconds(owed=owed)))

    def affords(self, configs: Sequence[Config], *, keep_sustained: bool = False) -> bool:
        """Whether confirmations of all these fit; as long as nothing was measured, any may try."""
        known = self.history.costs
        if not known.measured:
            return self.left > 0
        kept = max(map(self.sustained_seconds, configs)) if keep_sustained else 0.0
        return sum(confirm_seconds(known, config) for config in configs) + kept <= self.left

    def sustained_seconds(self, config: Config) -> float:
        """Of a sustained minute with its set-up, 0 where there will be none."""
        return confirm_seconds(self.history.costs, config) + _MINUTE_SECONDS if self._sustains else 0.0

    def reserve_seconds(self, starting: Config | None = None, *, owed: bool = False) -> float:
        """Time kept for confirmations if what runs, and the config about to start, prove the best.

        Half the budget at most, as long as that holds the usual blocks of the best against eager; the fewest blocks
        alone where the slice is ``owed``: a narrow interval is worth little while the likeliest winner, or eager
        training with the winner's batch, is unknown. Nothing is kept before a first compiled config was measured:
        there would be nothing to confirm.
        """
        if not self._finalists:
            return 0.0
        rivals, eager = self._longest_rivals, self._longest_eager
        if starting is not None and is_eager(starting):
            eager = max(eager, self._seconds(starting))
        elif starting is not None and in_space(self.history.spec, self.history.facts, starting):
            rivals = sorted([*rivals, self._seconds(starting)], reverse=True)[:2]
        pair = max(rivals, default=eager) + eager
        if owed:
            return FEWEST_BLOCKS * pair + _SLACK_SECONDS
        minute = self._seconds(self._finalists[0]) + _MINUTE_SECONDS if self._sustains else 0.0
        wanted = (DROPPED_BLOCKS + LEAST_ROUNDS) * (sum(rivals) + 2 * eager) + minute
        share = _CONFIRM_SHARE * (self.history.spec.budget.seconds or math.inf)
        return max(min(wanted, share), _USUAL_BLOCKS * pair) + _SLACK_SECONDS

    @cached_property
    def _sustains(self) -> bool:
        """A search ends in a sustained minute, but on a CPU, whose clock settles at once."""
        return isinstance(self.history.spec.plan, Search) and self.history.facts.devices[0].type != "cpu"

    @cached_property
    def _finalists(self) -> list[Config]:
        best = [score.config for score in finalists(self.history)]
        compiles = bool(compiled_scopes(self.history.spec, self.history.facts))
        return [] if compiles and all(is_eager(config) for config in best) else best

    @cached_property
    def _coming(self) -> list[Config]:
        return [record.config for record in self.history.running if record.role is not Role.CONFIRM]

    @cached_property
    def _longest_rivals(self) -> list[float]:
        """Seconds of the two longest turns among the finalists and what runs."""
        able = [config for config in self._coming if in_space(self.history.spec, self.history.facts, config)]
        compiled = [config for config in (*self._finalists, *able) if not is_eager(config)]
        return sorted(map(self._seconds, compiled), reverse=True)[:2]

    @cached_property
    def _longest_eager(self) -> float:
        best = next((score.config for score in self.history.searched if score.eager), None)
        eager = [*([best] if best is not None else []), *filter(is_eager, self._coming)]
        return max(map(self._seconds, eager), default=0.0)

    def _seconds(self, config: Config) -> float:
        """What confirmations really took shortens nothing here: the search would go on in the middle of a block."""
        return max(first_confirm_seconds(self.history.costs, config), confirm_seconds(self.history.costs, config))

    @cached_property
    def _cheapest_compile(self) -> float:
        """Of all that is untried and fits."""
        known = self.history.costs
        alike = by_compiler(self.history.spec, self.history.facts)
        for group in sorted(alike, key=lambda group: compile_seconds(known, group[0])):
            if any(is_open(self.history, config) and self.fits(config) for config in group):
                return compile_seconds(known, group[0])
        return math.inf


def is_open(history: History, config: Config) -> bool:
    """Neither tried nor pointless."""
    return key(config) not in history.trials and reason_against(history.lessons, config) is None
