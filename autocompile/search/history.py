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
from autocompile.search.per_record import PerRecord
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

    @cached_property
    def key(self) -> Key:
        return key(self.config)

    @cached_property
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
        return self._by_role[Role.SEARCH]

    @cached_property
    def confirmations(self) -> dict[Key, list[TrialRecord]]:
        return self._by_role[Role.CONFIRM]

    @cached_property
    def sustained(self) -> dict[Key, list[TrialRecord]]:
        return self._by_role[Role.PROBE]

    @cached_property
    def running(self) -> tuple[TrialRecord, ...]:
        return tuple(record for record in self.records if record.state is State.RUNNING)

    @cached_property
    def searched(self) -> tuple[Score, ...]:
        """Configs that may win by their search values, best first; one whose confirmation failed may not."""
        scores = self._scores(self.trials)
        if not self.confirmations and not self.sustained:
            return scores
        return tuple(score for score in scores if not self.spoiled(score.key))

    @cached_property
    def values(self) -> dict[Key, float]:
        """The objective of each of these."""
        return {score.key: score.objective for score in self.searched}

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

    @cached_property
    def phase(self) -> list[Block]:
        """The blocks since the search last went on."""
        return [block for block in self.blocks if block.arms and block.phase == self.blocks[-1].phase]

    @cached_property
    def lessons(self) -> Lessons:
        return lessons([entry.record for entry in self._entries if entry.failed])

    @cached_property
    def costs(self) -> Costs:
        return costs(self.spec, self.facts, self.records)

    @cached_property
    def cold_seconds(self) -> dict[Key, float]:
        """Of a compile from an empty cache; a confirmation sees a warm one and may not know."""
        cold: dict[Key, float] = {}
        for entry in self._entries:
            if entry.cold_seconds is not None:
                cold[entry.key] = max(entry.cold_seconds, cold.get(entry.key, 0.0))
        return cold

    def objective(self, record: TrialRecord) -> float:
        if record.number not in self._objectives:
            assert record.measurement is not None
            cold = self.cold_seconds[key(record.config)]
            self._objectives[record.number] = objective(self.spec, record.measurement, cold_seconds=cold)
        return self._objectives[record.number]

    @cached_property
    def _objectives(self) -> dict[int, float]:
        return {}

    @cached_property
    def _entries(self) -> list[_Entry]:
        """In the order they were started."""
        return sorted(_entries(self.spec, self.facts).of(self.records), key=_number)

    @cached_property
    def ordered(self) -> list[TrialRecord]:
        """The slices at full depth in the order they were started."""
        return [entry.record for entry in self._entries if entry.full_depth]

    @cached_property
    def _by_role(self) -> dict[Role, dict[Key, list[TrialRecord]]]:
        """By config, baselines with the search."""
        grouped: dict[Role, dict[Key, list[TrialRecord]]] = {role: {} for role in Role}
        for entry in self._entries:
            if entry.full_depth:
                role = Role.SEARCH if entry.record.role is Role.BASELINE else entry.record.role
                grouped[role].setdefault(entry.key, []).append(entry.record)
        return grouped

    def _scores(self, attempts: dict[Key, list[TrialRecord]]) -> tuple[Score, ...]:
        latest = [records[-1] for records in attempts.values() if records]
        entries = [entry for entry in _entries(self.spec, self.facts).of(latest) if entry.counts]
        scores = [entry.steady or Score(self.objective(entry.record), entry.record) for entry in entries]
        return tuple(sorted(scores, key=_descending))

    def counts(self, record: TrialRecord) -> bool:
        """Whether it may win."""
        return _entries(self.spec, self.facts).of([record])[0].counts

    @cached_property
    def eager_ran(self) -> bool:
        """Whether any eager training was measured within the memory there is, whatever became of it since."""
        return any(is_eager(record.config) and usable(self.spec, self.facts, record) for record in self.ordered)

    def sustained_speed(self, name: Key) -> float | None:
        """Tokens per second over a sustained minute, where the budget held one: what training sees on a hot GPU."""
        for record in reversed(self.sustained.get(name, [])):
            if record.state is State.COMPLETE and record.measurement:
                return record.measurement.tokens_per_second
        return None

    def spoiled(self, name: Key) -> bool:
        """Whether its last confirmation failed, or its sustained minute for a reason of its own."""
        attempts, minutes = self.confirmations.get(name, []), self.sustained.get(name, [])
        if is_over(minutes) and minutes[-1].state is not State.FAIL and not usable(self.spec, self.facts, minutes[-1]):
            return True
        return is_over(attempts) and not usable(self.spec, self.facts, attempts[-1])


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A record with what it says by itself. Whether it ``counts``: whether it may win.

    ``steady`` is its score where no run is planned: else other slices know how long its compile takes.
    """

    record: TrialRecord
    key: Key
    full_depth: bool
    failed: bool
    counts: bool
    cold_seconds: float | None
    steady: Score | None


@remembered(4)
def _entries(spec: StudySpec, facts: Facts) -> PerRecord[_Entry]:
    space, steady = by_key(spec, facts), spec.planned_tokens is None and spec.planned_steps is None
    today = key(spec.against) if spec.against else None

    def entry(record: TrialRecord) -> _Entry:
        """Plain whole-model compile is for comparison only where the space does not hold it. What the user runs today
        may win wherever it lies: then it is to be kept."""
        name, measurement = key(record.config), record.measurement
        given = isinstance(spec.plan, Paired) or is_eager(record.config) or name in space or name == today
        counts = given and usable(spec, facts, record)
        return _Entry(
            record=record,
            key=name,
            full_depth=record.fidelity == FULL_DEPTH,
            failed=record.failure is not None,
            counts=counts,
            cold_seconds=measurement.compile.cold_seconds if measurement else None,
            steady=Score(objective(spec, measurement), record) if counts and measurement and steady else None,
        )

    return PerRecord(entry)


def _descending(score: Score) -> float:
    return -score.objective


def _number(entry: _Entry) -> int:
    return entry.record.number


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
