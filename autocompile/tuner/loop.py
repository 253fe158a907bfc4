"""The coordinator's loop: ask the search what is next, run it in a free slot, keep what came back.

Only the thread that called `tune` touches the storage; one more per running slice waits in the executor. All that the
loop knows is in the storage too, so that a restart needs no repair: `kill -9` loses the slices in flight and at most
`SAVE_SECONDS` of the budget's count.
"""

from __future__ import annotations

import signal
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from autocompile.errors import MachineError
from autocompile.executors import Executor
from autocompile.processes import end_abandoned
from autocompile.records import Answer, Failed, Measured, State, Stopped, TrialRecord
from autocompile.search import (
    Ask,
    Finished,
    Measure,
    Step,
    Wait,
    abort_reason,
    admissible,
    best_config,
    brake_reason,
    compile_deadline,
    derived,
    next_step,
    of_broken_machine,
    verdict,
)
from autocompile.space import Config
from autocompile.spec import Facts, Fidelity, MeasureRequest, Role, StudySpec
from autocompile.tuner.events import Clock, Event, Interrupted, StudyResult, Tick, TrialEnded, TrialStarted, WallClock
from autocompile.tuner.folders import cache_folder, prepare, seed_folder, trial_folder, with_cache_named
from autocompile.tuner.opening import write_result, write_study_files
from autocompile.tuner.repeats import repeated
from autocompile.tuner.signals import signals
from autocompile.tuner.slices import left_behind, machine_failure, slice_seconds, stopped, told, with_headroom, with_mfu
from autocompile.tuner.slots import Slot, side_by_side

if TYPE_CHECKING:
    from autocompile.storage import Storage, StoredStudy

TICK_SECONDS = 0.5
SAVE_SECONDS = 5.0
LATE_SECONDS = 10.0  # after the budget's end, for slices whose own deadline did not end them
WIND_DOWN_SECONDS = 10.0


def tune(  # noqa: PLR0913  each is a seam that a test or another front end replaces
    spec: StudySpec,
    *,
    name: str,
    storage: Storage,
    executor: Executor,
    folder: Path,
    slots: Sequence[tuple[int, ...]],
    stop: threading.Event,
    clock: Clock | None = None,
    watch: Callable[[Event], None] = lambda event: None,
    began: float | None = None,
) -> StudyResult:
    """Run the study ``name`` (see `open_study`) until its verdict, the end of its budget, or an interruption.

    ``slots`` are the GPUs of each slice that may run at the same time, ``((),)`` on a CPU. ``stop`` is the event that
    the executor watches; it is set when the study is interrupted, and setting it interrupts the study. ``began`` is
    the clock's time at which the budget's count begins, for a caller whose preparations count too.

    Raises Interrupted on SIGINT, SIGTERM or ``stop``, MachineError where going on makes no sense, UserError where
    another process holds the study. In each case what was measured is kept, best.yaml and report.md are written.
    """
    clock = clock or WallClock()
    began = clock.now() if began is None else began
    with storage.hold(name):
        stored = _brought_up_to_date(storage, name, spec)
        write_study_files(folder, spec, stored.facts)
        loop = _Loop(
            study=_Study(name=name, spec=spec, facts=stored.facts, folder=folder, slots=side_by_side(slots)),
            storage=storage,
            executor=executor,
            stop=stop,
            clock=clock,
            watch=watch,
            used=stored.used_seconds,
            saved=began,
            records={record.number: record for record in storage.records(name)},
        )
        with signals(loop.ended) as caught:
            return loop.run_to_the_end(caught)


def _brought_up_to_date(storage: Storage, name: str, spec: StudySpec) -> StoredStudy:
    storage.mend(name)
    storage.set_budget(name, spec.budget)
    stored = storage.load(name)
    assert stored is not None
    return stored


@dataclass(frozen=True, kw_only=True)
class _Study:
    """What stays the same while the study runs."""

    name: str
    spec: StudySpec
    facts: Facts
    folder: Path
    slots: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A slice in flight."""

    record: TrialRecord
    slot: int
    began: float
    request: MeasureRequest


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """What a slot's thread leaves; no answer means that the executor itself broke, its traceback is on stderr."""

    number: int
    answer: Answer | None


@dataclass(kw_only=True)
class _Loop:
    """One run of the coordinator; times are the clock's.

    ``used`` is what the storage has counted, up to the time ``saved``; ``first_number`` is that of this run's first
    trial: what the machine did in earlier runs is no reason to give up now; ``void`` are the slices that ended those.
    """

    study: _Study
    storage: Storage
    executor: Executor
    stop: threading.Event
    clock: Clock
    watch: Callable[[Event], None]
    used: float
    saved: float
    records: dict[int, TrialRecord]
    free: list[int] = field(init=False)
    first_number: int = field(init=False)
    void: set[int] = field(init=False)
    ordered: tuple[TrialRecord, ...] | None = None
    running: dict[int, _Running] = field(default_factory=dict)
    ended: SimpleQueue[_Ended | None] = field(default_factory=SimpleQueue)  # None: a signal came

    def __post_init__(self) -> None:
        self.free = list(range(len(self.study.slots)))
        self.first_number = 1 + max(self.records, default=-1)
        self.void = of_broken_machine(list(self.records.values()))

    def run_to_the_end(self, caught: Sequence[int]) -> StudyResult:
        """Whatever ends it, nothing runs afterwards; best.yaml and report.md hold what is known."""
        try:
            self.take_over()
            self.run(caught)
        finally:
            answers = self.end_slices()  # before anything is kept, which a full disk or a locked file may prevent
            try:
                self.wind_down(answers)
            finally:
                result = self.result()
                write_result(result, self.study.folder)
        return result

    def take_over(self) -> None:
        """Close what an earlier coordinator left open: told where the answer is complete, else lost."""
        for record in [record for record in self.records.values() if record.state is State.RUNNING]:
            folder = trial_folder(self.study.folder, record.number)
            end_abandoned(folder / "log.txt")
            self._keep(left_behind(record, folder, self._all()))

    def run(self, caught: Sequence[int]) -> None:
        """Until the search has finished and nothing runs; ``caught`` are the signals that came."""
        while True:
            if caught or self.stop.is_set():
                raise Interrupted(self.study.name, caught[0] if caught else signal.SIGINT)
            if reason := abort_reason([record for record in self._all() if record.number >= self.first_number]):
                raise MachineError(reason)
            step = self._fill_slots()
            if isinstance(step, Finished) and not self.running:
                return
            assert self.running, f"{step} with nothing running would wait for ever"
            self._wait()

    def end_slices(self) -> list[_Ended]:
        """What the running slices come back with when they are told to end; one that does not will be abandoned."""
        answers: list[_Ended] = []
        if self.running:
            self.stop.set()
        limit = self.clock.now() + WIND_DOWN_SECONDS
        while self.running.keys() - {ended.number for ended in answers} and (left := limit - self.clock.now()) > 0:
            if ended := self.clock.get(self.ended, left):
                answers.append(ended)
        return answers

    def wind_down(self, answers: Sequence[_Ended]) -> None:
        """Keep what ended last."""
        for ended in answers:
            self._close(ended)
        self._abandon(Stopped(reason="interrupted"))
        self._save_seconds()

    def result(self) -> StudyResult:
        study, records = self.study, tuple(self.records[number] for number in sorted(self.records))
        return StudyResult(
            name=study.name,
            spec=study.spec,
            facts=study.facts,
            records=records,
            derived=derived(study.spec, study.facts, records),
            verdict=verdict(study.spec, study.facts, records),
            brake=brake_reason(self._all()),
            used_seconds=self.used,  # as the storage has it
            total_seconds=study.spec.budget.seconds,
            best=best_config(study.name, study.spec, study.facts, records),
        )

    def _fill_slots(self) -> Step:
        """Start slices while there is a slot and something to measure; the step that could not be taken."""
        study = self.study
        while self.free:
            used = self._used()
            step = next_step(study.spec, study.facts, self._all(), used)
            match step:
                case Measure(config=config, role=role, fidelity=fidelity):
                    self._start(config, role, fidelity)
                case Ask(fidelity=fidelity):
                    self._start(self._suggestion(used), Role.SEARCH, fidelity)
                case _:
                    return step
        return Wait()  # the search need not be asked: deciding costs time that a slice beside it would feel

    def _suggestion(self, used: float) -> Config:
        from autocompile.sampling import suggest  # imports optuna, which the live view's import of this must not

        spec, facts, records = self.study.spec, self.study.facts, self._all()
        config = suggest(spec, facts, records=records, admissible=admissible(spec, facts, records, used))
        assert config is not None  # the search asks only while an admissible config is left
        return config

    def _start(self, config: Config, role: Role, fidelity: Fidelity) -> None:
        study, slot = self.study, self.free.pop(0)  # confirmations, one by one, have the same GPUs and CPUs
        number = self.storage.open_trial(study.name, config=config, role=role, fidelity=fidelity)
        record = TrialRecord(number=number, role=role, state=State.RUNNING, config=dict(config), fidelity=fidelity)
        place, workload = study.slots[slot], study.spec.workload.of_config(config)
        request = MeasureRequest(
            workload=workload,
            config=record.config,
            role=role,
            fidelity=fidelity,
            seed=study.spec.seed,
            devices=place.devices[: workload.gpus_per_trial],
            cpus=place.cpus,
            deadline_seconds=self._deadline_seconds(role, config),
            cache_folder=str(cache_folder(study.spec, study.facts, config, study_folder=study.folder)),
        )
        request = repeated(request, self._all(), first_number=self.first_number)
        folder = trial_folder(study.folder, number)
        self._put(record)
        self.running[number] = _Running(record=record, slot=slot, began=self.clock.now(), request=request)
        self.watch(TrialStarted(slot=slot, number=number, role=role, config=record.config, folder=folder))
        threading.Thread(target=self._run_slice, args=(number, request, folder), daemon=True).start()

    def _deadline_seconds(self, role: Role, config: Config) -> float:
        """What the budget leaves for a slice that starts now; confirmations and the probe after them get all of it."""
        before_confirmations = compile_deadline(self.study.spec, self.study.facts, self._all(), self._used(), config)
        return slice_seconds(self._left(), None if role in (Role.CONFIRM, Role.PROBE) else before_confirmations)

    def _run_slice(self, number: int, request: MeasureRequest, folder: Path) -> None:
        """In a thread of its own: prepare the folders, wait for the executor, leave the answer."""
        study, answer = self.study, None
        seed = seed_folder(study.spec, study.folder.parent) if study.facts.devices[0].type == "cpu" else None
        try:
            answer = with_cache_named(prepare(request, folder, seed) or self.executor.run(request, folder), request)
        finally:
            self.ended.put(_Ended(number=number, answer=answer))

    def _wait(self) -> None:
        """For the next answer, at most one tick."""
        if ended := self.clock.get(self.ended, TICK_SECONDS):
            self._close(ended)
        if not 0 <= self.clock.now() - self.saved < SAVE_SECONDS:
            self._save_seconds()
        left = self._left()
        if left is not None and left < -LATE_SECONDS:
            self._abandon(Stopped(reason="budget", bound=self.study.spec.budget.seconds))
        self.watch(Tick(seconds_used=self._used()))

    def _close(self, ended: _Ended) -> None:
        """Keep what a slice came back with; one that was abandoned before is closed already."""
        if (running := self.running.pop(ended.number, None)) is None:
            return
        insort(self.free, running.slot)
        answer = ended.answer
        if not isinstance(answer, Measured | Failed):
            answer = machine_failure("the executor broke, see its traceback")
        deadline = running.request.deadline_seconds
        seconds = max(0.0, self.clock.now() - running.began)
        self._keep(told(running.record, answer, self._all(), seconds=seconds, deadline_seconds=deadline))
        self._save_seconds()

    def _abandon(self, why: Stopped) -> None:
        """Close all that still runs without its answer; time is over, so nothing starts in a slot that is not free."""
        for running in list(self.running.values()):
            del self.running[running.record.number]
            insort(self.free, running.slot)
            self._keep(stopped(running.record, why, seconds=max(0.0, self.clock.now() - running.began)))

    def _keep(self, record: TrialRecord) -> None:
        record = with_mfu(with_headroom(record, self.study.spec, self.study.facts), self.study.facts)
        self.storage.close_trial(self.study.name, record)
        self._put(record)
        self.watch(TrialEnded(record=record))

    def _save_seconds(self) -> None:
        used, now = self._used(), self.clock.now()
        self.storage.add_seconds(self.study.name, used - self.used)
        self.used, self.saved = used, now
        self.storage.beat(self.study.name)

    def _put(self, record: TrialRecord) -> None:
        self.records[record.number] = record
        self.ordered = None

    def _all(self) -> tuple[TrialRecord, ...]:
        """All that count; the very same tuple until one changes, since what was found out about it is remembered."""
        if self.ordered is None:
            self.ordered = tuple(self.records[number] for number in sorted(self.records.keys() - self.void))
        return self.ordered

    def _used(self) -> float:
        return self.used + max(0.0, self.clock.now() - self.saved)  # a clock that goes back gives no time back

    def _left(self) -> float | None:
        return None if (total := self.study.spec.budget.seconds) is None else total - self._used()
