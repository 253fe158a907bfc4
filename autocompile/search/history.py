"""The records of a study seen as configs: what was tried, what may be tried again, and how the measured ones rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autocompile.records import Measurement, State, TrialRecord
from autocompile.search.blocks import Block, blocks
from autocompile.search.canonical import Key, by_key, is_eager, key
from autocompile.search.cost import Costs, costs
from autocompile.search.lessons import Lessons, lessons
from autocompile.search.objective import objective
from autocompile.search.treatment import is_over
from autocompile.space import Config
from autocompile.spec import FULL_DEPTH, Facts, Paired, Role, StudySpec
from autocompile.values import remembered


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
        return self._by_config(Role.BASELINE, Role.SEARCH)

    @cached_property
    def confirmations(self) -> dict[Key, list[TrialRecord]]:
        return self._by_config(Role.CONFIRM)

    @cached_property
    def sustained(self) -> dict[Key, list[TrialRecord]]:
        return self._by_config(Role.PROBE)

    @cached_property
    def running(self) -> tuple[TrialRecord, ...]:
        return tuple(record for record in self.records if record.state is State.RUNNING)

    @cached_property
    def searched(self) -> tuple[Score, ...]:
        """Configs that may win by their search values, best first; one whose confirmation failed may not."""
        scores = self._scores(self.trials)
        return tuple(score for score in scores if not self.spoiled(score.key))

    @cached_property
    def confirmed(self) -> tuple[Score, ...]:
        """The same by their last confirmations that count."""
        sound = {name: attempts for name, attempts in self.confirmations.items() if not self.spoiled(name)}
        return self._scores({name: list(filter(self.counts, attempts)) for name, attempts in sound.items()})

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The confirmations that count."""
        ended = (record for record in self.ordered if record.role is not Role.CONFIRM or self.counts(record))
        return blocks(self.spec.plan, ended)

    @property
    def phase(self) -> list[Block]:
        """The blocks since the search last went on."""
        return [block for block in self.blocks if block.arms and block.phase == self.blocks[-1].phase]

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
            if (measurement := record.measurement) is not None:
                name = self.keys[record.number]
                cold[name] = max(measurement.compile.cold_seconds, cold.get(name, 0.0))
        return cold

    def objective(self, record: TrialRecord) -> float:
        if record.number not in self._objectives:
            assert record.measurement is not None
            cold = self.cold_seconds[self.keys[record.number]]
            self._objectives[record.number] = objective(self.spec, record.measurement, cold_seconds=cold)
        return self._objectives[record.number]

    @cached_property
    def _objectives(self) -> dict[int, float]:
        return {}

    @cached_property
    def keys(self) -> dict[int, Key]:
        """By number."""
        return {record.number: key(record.config) for record in self.records}

    @cached_property
    def ordered(self) -> list[TrialRecord]:
        """The slices at full depth in the order they were started."""
        ordered = sorted(self.records, key=lambda record: record.number)
        return [record for record in ordered if record.fidelity is FULL_DEPTH or record.fidelity == FULL_DEPTH]

    def _by_config(self, *roles: Role) -> dict[Key, list[TrialRecord]]:
        grouped: dict[Key, list[TrialRecord]] = {}
        for record in self.ordered:
            if record.role in roles:
                grouped.setdefault(self.keys[record.number], []).append(record)
        return grouped

    def _scores(self, attempts: dict[Key, list[TrialRecord]]) -> tuple[Score, ...]:
        latest = [records[-1] for records in attempts.values() if records]
        scores = [Score(self.objective(record), record) for record in latest if self.counts(record)]
        return tuple(sorted(scores, key=lambda score: -score.objective))

    def counts(self, record: TrialRecord) -> bool:
        """Whether it may win. Plain whole-model compile is for comparison only where the space does not hold it."""
        if not usable(self.spec, self.facts, record):
            return False
        given = isinstance(self.spec.plan, Paired) or is_eager(record.config)
        return given or self.keys[record.number] in by_key(self.spec, self.facts)

    def spoiled(self, name: Key) -> bool:
        """Whether its last confirmation failed."""
        attempts = self.confirmations.get(name, [])
        return is_over(attempts) and not usable(self.spec, self.facts, attempts[-1])


@remembered(4)
def history_of(spec: StudySpec, facts: Facts, records: tuple[TrialRecord, ...]) -> History:
    """The same one, with all that was found out, for all questions until there is another record."""
    return History(spec, facts, records)


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
