"""The records of a study seen as configs: what was tried, what may be tried again, and how the measured ones rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autocompile.records import FailureKind, Measurement, State, TrialRecord
from autocompile.search.canonical import Key, in_space, is_eager, key
from autocompile.search.cost import Costs, costs
from autocompile.search.lessons import Lessons, lessons
from autocompile.search.objective import objective
from autocompile.space import Config
from autocompile.spec import FULL_DEPTH, Facts, Paired, Role, StudySpec


@dataclass(frozen=True)
class Score:
    """A record that counts, with its objective."""

    objective: float
    record: TrialRecord

    @property
    def config(self) -> Config:
        return self.record.config

    @property
    def key(self) -> Key:
        return key(self.config)

    @property
    def eager(self) -> bool:
        return is_eager(self.config)

    @property
    def measurement(self) -> Measurement:
        assert self.record.measurement is not None
        return self.record.measurement


@dataclass(frozen=True)
class History:
    """A study's records with its spec and facts, and what follows from them."""

    spec: StudySpec
    facts: Facts
    records: tuple[TrialRecord, ...]

    @cached_property
    def trials(self) -> dict[Key, list[TrialRecord]]:
        """Baselines and search by config, in the order they were started."""
        return _by_config(record for record in self._full_depth if record.role is not Role.CONFIRM)

    @cached_property
    def confirmations(self) -> dict[Key, list[TrialRecord]]:
        return _by_config(record for record in self._full_depth if record.role is Role.CONFIRM)

    @cached_property
    def running(self) -> tuple[TrialRecord, ...]:
        return tuple(record for record in self.records if record.state is State.RUNNING)

    @cached_property
    def searched(self) -> tuple[Score, ...]:
        """Configs that may win by their search values, best first; one whose confirmation failed may not."""
        scores = self._scores(self.trials)
        return tuple(score for score in scores if not self._spoiled(score.key))

    @cached_property
    def confirmed(self) -> tuple[Score, ...]:
        """The same by their confirmations."""
        return self._scores(self.confirmations)

    @cached_property
    def lessons(self) -> Lessons:
        return lessons(self.records)

    @cached_property
    def costs(self) -> Costs:
        return costs(self.spec, self.facts, self.records)

    @cached_property
    def cold_seconds(self) -> dict[Key, float]:
        """Of a compile from an empty cache; a confirmation sees a warm one and may not know."""
        cold: dict[Key, float] = {}
        for record in self.records:
            if record.measurement:
                seconds = record.measurement.compile.cold_seconds
                cold[key(record.config)] = max(seconds, cold.get(key(record.config), 0.0))
        return cold

    def objective(self, record: TrialRecord) -> float:
        measurement = record.measurement
        assert measurement is not None
        cold = measurement.compile.model_copy(update={"cold_seconds": self.cold_seconds[key(record.config)]})
        return objective(self.spec, measurement.model_copy(update={"compile": cold}))

    @property
    def _full_depth(self) -> list[TrialRecord]:
        ordered = sorted(self.records, key=lambda record: record.number)
        return [record for record in ordered if record.fidelity == FULL_DEPTH]

    def _scores(self, attempts: dict[Key, list[TrialRecord]]) -> tuple[Score, ...]:
        latest = [records[-1] for records in attempts.values()]
        scores = [Score(self.objective(record), record) for record in latest if self._may_win(record)]
        return tuple(sorted(scores, key=lambda score: -score.objective))

    def _may_win(self, record: TrialRecord) -> bool:
        """What a plain whole-model compile reaches is for comparison only where the space does not hold it."""
        given = isinstance(self.spec.plan, Paired) or is_eager(record.config)
        return usable(self.spec, self.facts, record) and (given or in_space(self.spec, self.facts, record.config))

    def _spoiled(self, name: Key) -> bool:
        attempts = self.confirmations.get(name, [])
        return is_over(attempts) and not usable(self.spec, self.facts, attempts[-1])


def usable(spec: StudySpec, facts: Facts, record: TrialRecord) -> bool:
    """It was measured as what it claims to be, and within the memory a user can count on."""
    measurement = record.measurement
    if record.state is not State.COMPLETE or measurement is None or tight_memory(spec, facts, measurement):
        return False
    if is_eager(record.config):
        return True
    applied = record.outcome.telemetry.compile_applied if record.outcome else None
    return applied != "none" and "partial_eager" not in measurement.degraded


def tight_memory(spec: StudySpec, facts: Facts, measurement: Measurement) -> bool:
    """Whether less of the device's memory stayed free than the study keeps as headroom."""
    used = measurement.device_memory_bytes or measurement.reserved_memory_bytes or 0
    return "tight_memory" in measurement.degraded or used > (1 - spec.memory_headroom) * facts.devices[0].memory_bytes


def deserves_repeat(attempts: Sequence[TrialRecord]) -> bool:
    """Once after a failure that may not be the config's; as often as it takes where the user or the budget ended it."""
    if not attempts or not _inconclusive(attempts[-1]):
        return False
    return sum(_inconclusive(record) and not _cut_short(record) for record in attempts) <= 1


def is_over(attempts: Sequence[TrialRecord]) -> bool:
    """Whether something is known, or nothing more is to be tried."""
    return bool(attempts) and attempts[-1].state is not State.RUNNING and not deserves_repeat(attempts)


def _by_config(records: Iterable[TrialRecord]) -> dict[Key, list[TrialRecord]]:
    grouped: dict[Key, list[TrialRecord]] = {}
    for record in records:
        grouped.setdefault(key(record.config), []).append(record)
    return grouped


def _inconclusive(record: TrialRecord) -> bool:
    killed = record.failure is not None and record.failure.kind is FailureKind.HOST_OOM
    return record.state is State.FAIL or (record.state is State.PRUNED and killed)


def _cut_short(record: TrialRecord) -> bool:
    return record.stopped is not None and record.stopped.reason in ("budget", "interrupted")
