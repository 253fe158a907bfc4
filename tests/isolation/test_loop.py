"""The coordinator's loop on a simulated clock: slots, deadlines, and executors that misbehave."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import pytest

from autocompile.errors import MachineError
from autocompile.records import (
    ANSWER,
    Answer,
    State,
)
from autocompile.space import SearchSpace, defaults
from autocompile.spec import (
    FULL_DEPTH,
    Budget,
    Device,
    Facts,
    Grid,
    MeasureRequest,
    PreflightRequest,
    Role,
    StudySpec,
    WorkloadSpec,
)
from autocompile.storage import Storage
from autocompile.tuner import Event, Interrupted, StudyResult, Tick, TrialEnded, TrialStarted, tune
from autocompile.tuner.loop import SAVE_SECONDS
from tests.contract import fake_child

T = TypeVar("T")
GPUS = tuple(
    Device(uuid=f"GPU-{n}", name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, capability="9.0") for n in (0, 1)
)
FACTS = Facts(devices=GPUS, layers=32, parameters=1_100_000_000, environment={"torch": "2.13.0"})
SPACE = SearchSpace.model_validate(
    {
        "format": 1,
        "parameters": {
            "scope": {"choices": ["none", "layer", "model"], "default": "none", "why": "a test"},
            "micro_batch": {"low": 2, "high": 8, "scale": "log2", "default": 4, "why": "a test"},
        },
    }
)
SPEC = StudySpec(workload=WorkloadSpec(model="tiny-llama"), space=SPACE, budget=Budget(seconds=1000, trials=5))


class SimulatedClock:
    """Time that stands still while anything happens, and jumps a second when nothing does."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def get(self, queue: SimpleQueue[T], seconds: float) -> T | None:
        try:
            return queue.get(timeout=0.02)
        except Empty:
            self._now += 1.0
            return None


@dataclass
class Simulated:
    """An executor whose slices take so many simulated seconds; ``None`` is one that never comes back."""

    clock: SimulatedClock
    stop: threading.Event
    seconds: float | None = 3.0
    running: set[tuple[int, ...]] = field(default_factory=set)
    together: list[int] = field(default_factory=list)
    requests: list[MeasureRequest] = field(default_factory=list)

    def run(self, request: MeasureRequest | PreflightRequest, folder: Path) -> Answer:
        assert isinstance(request, MeasureRequest)
        assert request.devices not in self.running  # a slot runs one slice at a time
        self.running.add(request.devices)
        self.requests.append(request)
        self.together.append(len(self.running))
        until = self.clock.now() + (1e9 if self.seconds is None else self.seconds)
        while self.clock.now() < until and not (self.stop.is_set() and self.seconds is not None):
            time.sleep(0.001)
        self.running.discard(request.devices)
        return ANSWER.validate_python(fake_child.measurement(request.config))


@dataclass
class Broken:
    """An executor with a bug."""

    def run(self, request: MeasureRequest | PreflightRequest, folder: Path) -> Answer:
        raise RuntimeError("a bug in the executor")


def run(
    folder: Path,
    spec: StudySpec,
    *,
    seconds: float | None = 3.0,
    slots: Sequence[tuple[int, ...]] = ((0,), (1,)),
    events: list[Event] | None = None,
    used: float = 0.0,
) -> tuple[StudyResult, Simulated]:
    clock, stop = SimulatedClock(), threading.Event()
    executor = Simulated(clock, stop, seconds)
    seen = events if events is not None else []
    with Storage.open(f"sqlite:///{folder / 'study.db'}") as storage:
        storage.create("study", spec, FACTS)
        storage.add_seconds("study", used)
        result = tune(
            spec,
            name="study",
            storage=storage,
            executor=executor,
            folder=folder / "study",
            slots=slots,
            stop=stop,
            clock=clock,
            watch=seen.append,
        )
        assert storage.records("study") == list(result.records)
        stored = storage.load("study")
        assert stored is not None
        assert stored.used_seconds == pytest.approx(result.used_seconds)
    return result, executor


def test_two_slots_measure_at_the_same_time_each_on_its_own_gpu(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"budget": Budget(seconds=1000, trials=9)})  # baselines, then two for the sampler
    result, executor = run(tmp_path, spec)
    assert max(executor.together) == 2
    assert {request.devices for request in executor.requests} == {(0,), (1,)}
    assert {request.devices for request in executor.requests if request.role is Role.CONFIRM} == {(0,)}
    assert {record.state for record in result.records} == {State.COMPLETE}
    assert result.verdict.confirmed


def test_each_slot_has_cpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {90, 91, 92, 95})  # of which the kernel here knows nothing
    _, executor = run(tmp_path, SPEC.model_copy(update={"plan": Grid()}))
    assert {(request.devices, request.cpus) for request in executor.requests} == {((0,), (90, 91)), ((1,), (92, 95))}


def test_one_slot_never_runs_two_and_has_all_cpus(tmp_path: Path) -> None:
    _, executor = run(tmp_path, SPEC, slots=((1,),))
    assert set(executor.together) == {1}
    assert {request.cpus for request in executor.requests} == {()}
    assert {request.devices for request in executor.requests} == {(1,)}


def test_no_slice_s_deadline_lies_behind_the_budget(tmp_path: Path) -> None:
    result, executor = run(tmp_path, SPEC, used=700.0)
    assert max(request.deadline_seconds for request in executor.requests) <= 300
    assert result.used_seconds <= 1000


def test_every_trial_is_told_to_the_watcher_when_it_starts_and_ends(tmp_path: Path) -> None:
    events: list[Event] = []
    result, _ = run(tmp_path, SPEC, events=events)
    numbers = [record.number for record in result.records]
    assert sorted(event.number for event in events if isinstance(event, TrialStarted)) == numbers
    assert sorted(event.record.number for event in events if isinstance(event, TrialEnded)) == numbers


@pytest.mark.parametrize(
    "slots", [pytest.param(((0,),), id="in the only slot"), pytest.param(((0,), (1,)), id="in both slots")]
)
def test_a_slice_that_never_comes_back_is_abandoned_soon_after_the_budget(
    tmp_path: Path, slots: Sequence[tuple[int, ...]]
) -> None:
    spec = SPEC.model_copy(update={"budget": Budget(seconds=60)})
    result, _ = run(tmp_path, spec, seconds=None, slots=slots)
    assert 60 < result.used_seconds <= 60 + 15
    assert {record.stopped and record.stopped.reason for record in result.records} == {"budget"}


def test_a_measurement_left_behind_is_flagged_where_it_left_too_little_memory(tmp_path: Path) -> None:
    answer = fake_child.measurement(defaults())
    answer["measurement"] |= {"reserved_memory_bytes": 79 << 30, "device_memory_bytes": 79 << 30}
    folder = tmp_path / "study" / "trials" / "0"
    folder.mkdir(parents=True)
    (folder / "outcome.json").write_text(json.dumps(answer))
    clock, stop = SimulatedClock(), threading.Event()
    with Storage.open(f"sqlite:///{tmp_path / 'study.db'}") as storage:
        storage.create("study", SPEC, FACTS)
        storage.open_trial("study", config=defaults(), role=Role.BASELINE, fidelity=FULL_DEPTH)
        tune(
            SPEC,
            name="study",
            storage=storage,
            executor=Simulated(clock, stop),
            folder=tmp_path / "study",
            slots=((0,),),
            stop=stop,
            clock=clock,
        )
        found = storage.records("study")[0].measurement
    assert found is not None
    assert found.degraded == ("tight_memory",)


def test_setting_stop_ends_all_slots(tmp_path: Path) -> None:
    def stop_at_the_second(event: Event) -> None:
        if isinstance(event, TrialStarted) and event.number == 1:
            stop.set()

    clock, stop = SimulatedClock(), threading.Event()
    with Storage.open(f"sqlite:///{tmp_path / 'study.db'}") as storage:
        storage.create("study", SPEC, FACTS)
        with pytest.raises(Interrupted) as interruption:
            tune(
                SPEC,
                name="study",
                storage=storage,
                executor=Simulated(clock, stop),
                folder=tmp_path / "study",
                slots=((0,), (1,)),
                stop=stop,
                clock=clock,
                watch=stop_at_the_second,
            )
        assert interruption.value.exit_code == 130
        assert State.RUNNING not in {record.state for record in storage.records("study")}


class JumpingClock(SimulatedClock):
    """One that is set back by an hour, and later forward by an hour."""

    def __init__(self) -> None:
        super().__init__()
        self._jumps = {30: -3600.0, 60: 3600.0}
        self._looks = 0

    def get(self, queue: SimpleQueue[T], seconds: float) -> T | None:
        self._looks += 1
        self._now += self._jumps.pop(self._looks, 0.0)
        return super().get(queue, min(seconds, 1.0))


def test_a_clock_that_jumps_gives_no_time_back_and_leaves_nothing_open(tmp_path: Path) -> None:
    clock, stop, used = JumpingClock(), threading.Event(), [0.0]

    def watch(event: Event) -> None:
        if isinstance(event, Tick):
            used.append(event.seconds_used)

    with Storage.open(f"sqlite:///{tmp_path / 'study.db'}") as storage:
        storage.create("study", SPEC, FACTS)
        result = tune(
            SPEC,
            name="study",
            storage=storage,
            executor=Simulated(clock, stop),
            folder=tmp_path / "study",
            slots=((0,),),
            stop=stop,
            clock=clock,
            watch=watch,
        )
        assert storage.records("study") == list(result.records)
        stored = storage.load("study")
        assert stored is not None
        assert stored.used_seconds == pytest.approx(result.used_seconds)
    assert all(later >= earlier - SAVE_SECONDS for earlier, later in itertools.pairwise(used))
    assert State.RUNNING not in {record.state for record in result.records}
    assert all(record.seconds is None or record.seconds >= 0 for record in result.records)
    assert result.best is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_executor_does_not_hang_the_study(tmp_path: Path) -> None:
    with Storage.open(f"sqlite:///{tmp_path / 'study.db'}") as storage:
        storage.create("study", SPEC, FACTS)
        with pytest.raises(MachineError, match="executor broke"):
            tune(
                SPEC,
                name="study",
                storage=storage,
                executor=Broken(),
                folder=tmp_path / "study",
                slots=((0,),),
                stop=threading.Event(),
            )
