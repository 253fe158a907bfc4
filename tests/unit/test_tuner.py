"""The coordinator's loop on a simulated clock, and the decisions beside it."""

from __future__ import annotations

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
    Compile,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Measurement,
    Stage,
    State,
    StepSeconds,
    Stopped,
    TrialRecord,
)
from autocompile.space import SearchSpace, defaults
from autocompile.spec import (
    Budget,
    Device,
    Facts,
    Fidelity,
    MeasureRequest,
    Paired,
    PreflightRequest,
    Role,
    StudySpec,
    WorkloadSpec,
)
from autocompile.storage import Storage
from autocompile.tuner import Event, Interrupted, StudyResult, TrialEnded, TrialStarted, tune
from autocompile.tuner.folders import cache_folder, copy_seed
from autocompile.tuner.opening import differences, study_name
from autocompile.tuner.slices import SLICE_SECONDS, slice_seconds, told
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
SPEC = StudySpec(workload=WorkloadSpec(model="tiny-llama"), space=SPACE, budget=Budget(seconds=1000))
RUNNING = TrialRecord(number=3, role=Role.SEARCH, state=State.RUNNING, config=defaults())
MEASURED = Measured(
    measurement=Measurement(
        tokens_per_second=5,
        step_seconds=StepSeconds(median=1, low=1, high=1, n=5),
        compile=Compile(seconds=0, cold_seconds=0, cache="none"),
    )
)


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
    seconds: float | None = 10.0
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
    seconds: float | None = 10.0,
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
    result, executor = run(tmp_path, SPEC)
    assert max(executor.together) == 2
    assert {request.devices for request in executor.requests} == {(0,), (1,)}
    assert {record.state for record in result.records} == {State.COMPLETE}
    assert result.verdict.confirmed


def test_one_slot_never_runs_two(tmp_path: Path) -> None:
    _, executor = run(tmp_path, SPEC, slots=((1,),))
    assert set(executor.together) == {1}
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


def test_a_slice_that_never_comes_back_is_abandoned_soon_after_the_budget(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"budget": Budget(seconds=60)})
    result, _ = run(tmp_path, spec, seconds=None)
    assert 60 < result.used_seconds <= 60 + 15
    assert {record.stopped and record.stopped.reason for record in result.records} == {"budget"}


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


def failed(kind: FailureKind, subkind: str | None = None) -> Failed:
    return Failed(failure=Failure(kind=kind, stage=Stage.WARMUP, message="m", subkind=subkind))


@pytest.mark.parametrize(
    ("outcome", "state", "stopped"),
    [
        pytest.param(MEASURED, State.COMPLETE, None, id="measured"),
        pytest.param(failed(FailureKind.OOM), State.PRUNED, None, id="the config's fault"),
        pytest.param(failed(FailureKind.HANG), State.PRUNED, None, id="a hang"),
        pytest.param(failed(FailureKind.UNKNOWN), State.PRUNED, None, id="nobody knows"),
        pytest.param(failed(FailureKind.GPU_FAULT), State.FAIL, None, id="the GPU's fault"),
        pytest.param(failed(FailureKind.INFRASTRUCTURE), State.FAIL, None, id="the machine's fault"),
        pytest.param(
            failed(FailureKind.INFRASTRUCTURE, "interrupted"),
            State.FAIL,
            Stopped(reason="interrupted"),
            id="interrupted",
        ),
        pytest.param(
            failed(FailureKind.INFRASTRUCTURE, "budget"),
            State.FAIL,
            Stopped(reason="budget", bound=60),
            id="out of budget",
        ),
    ],
)
def test_what_an_answer_makes_of_a_trial(outcome: Measured | Failed, state: State, stopped: Stopped | None) -> None:
    record = told(RUNNING, outcome, seconds=7, deadline_seconds=60)
    assert (record.state, record.stopped, record.seconds) == (state, stopped, 7)
    assert record.outcome == (None if stopped else outcome)
    assert record.value == (5 if state is State.COMPLETE else None)


def test_a_slice_with_budget_left_that_never_answered_hung() -> None:
    outcome = failed(FailureKind.INFRASTRUCTURE, "budget")
    record = told(RUNNING, outcome, seconds=7, deadline_seconds=SLICE_SECONDS)
    assert record.failure is not None
    assert (record.state, record.failure.kind) == (State.PRUNED, FailureKind.HANG)


def test_a_shallow_measurement_is_no_value() -> None:
    shallow = RUNNING.model_copy(update={"fidelity": Fidelity(layers=2)})
    record = told(shallow, MEASURED, seconds=7, deadline_seconds=60)
    assert (record.state, record.value, record.value_source) == (State.COMPLETE, None, None)


@pytest.mark.parametrize(
    ("left", "before_confirmations", "seconds"),
    [
        pytest.param(None, 900, 1500, id="no budget"),
        pytest.param(7200, 900, 1500, id="plenty left"),
        pytest.param(600, None, 600, id="a confirmation has all that is left"),
        pytest.param(600, 500, 500, id="the time for confirmations is kept"),
        pytest.param(600, 5, 600, id="unless nothing sensible is left without it"),
        pytest.param(-3, 0, 1, id="nothing left"),
    ],
)
def test_slice_seconds(left: float | None, before_confirmations: float | None, seconds: float) -> None:
    assert slice_seconds(left, before_confirmations) == seconds


@pytest.mark.parametrize(
    ("workload", "device", "start"),
    [
        pytest.param({"model": "llama2-7b"}, GPUS[0], "llama2-7b-full-h100-80gb-hbm3-", id="a catalogue model"),
        pytest.param({"model": "Qwen/Qwen2.5-7B"}, GPUS[0], "qwen2.5-7b-full-h100-80gb-hbm3-", id="a Hub id"),
        pytest.param({"model": "/data/my model/"}, GPUS[0], "my-model-full-h100-80gb-hbm3-", id="a directory"),
        pytest.param(
            {"script": "jobs/train.py:build"},
            Device(type="cpu", uuid="cpu", name="Intel(R) Xeon(R)", memory_bytes=1),
            "train-build-full-cpu-",
            id="a script on a CPU",
        ),
    ],
)
def test_study_name(workload: dict[str, str], device: Device, start: str) -> None:
    spec = SPEC.model_copy(update={"workload": WorkloadSpec.model_validate(workload)})
    name = study_name(spec, FACTS.model_copy(update={"devices": (device,)}))
    assert name == start + spec.hash()[:8]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        pytest.param({"a": {"b": 1}}, {"a": {"b": 1}}, [], id="equal"),
        pytest.param({"a": {"b": 1}}, {"a": {"b": 2}}, [("a.b", 1, 2)], id="a leaf"),
        pytest.param({"a": 1}, {"b": 2}, [("a", 1, None), ("b", None, 2)], id="keys of one side"),
        pytest.param({"a": [1, 2]}, {"a": [2, 1]}, [("a", [1, 2], [2, 1])], id="a list is one value"),
    ],
)
def test_differences(old: object, new: object, found: list[tuple[str, object, object]]) -> None:
    assert list(differences(old, new)) == found


@pytest.mark.parametrize(
    ("spec", "facts", "config", "same"),
    [
        pytest.param(SPEC, FACTS, {"mode": "max-autotune"}, True, id="a knob that means nothing in eager training"),
        pytest.param(SPEC, FACTS, {"sdpa": "math"}, False, id="another attention kernel"),
        pytest.param(
            SPEC, FACTS.model_copy(update={"environment": {"torch": "2.14"}}), {}, False, id="another environment"
        ),
        pytest.param(
            SPEC.model_copy(update={"workload": WorkloadSpec(model="gpt2")}), FACTS, {}, False, id="another workload"
        ),
        pytest.param(SPEC.model_copy(update={"plan": Paired(configs=())}), FACTS, {}, True, id="another plan"),
    ],
)
def test_caches_are_shared_only_by_what_compiles_alike(
    spec: StudySpec, facts: Facts, config: dict[str, str], same: bool, tmp_path: Path
) -> None:
    first = cache_folder(SPEC, FACTS, defaults(), study_folder=tmp_path)
    second = cache_folder(spec, facts, {**defaults(), **config}, study_folder=tmp_path)
    assert (first == second) is same
    assert first.parent == tmp_path / "cache"


def test_a_cache_that_is_in_use_is_not_overwritten_by_the_seed(tmp_path: Path) -> None:
    seed, cache = tmp_path / "seed", tmp_path / "cache"
    for folder, text in ((seed, "seed"), (cache, "compiled")):
        folder.mkdir()
        (folder / "file").write_text(text)
    copy_seed(seed, cache)
    assert (cache / "file").read_text() == "compiled"
