"""What an answer makes of its trial, deadlines, names and cache folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from autocompile.records import (
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
    Paired,
    Role,
    StudySpec,
    WorkloadSpec,
)
from autocompile.tuner.folders import cache_folder, copy_seed
from autocompile.tuner.opening import differences, study_name
from autocompile.tuner.slices import SLICE_SECONDS, slice_seconds, told, with_headroom

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


@pytest.mark.parametrize(
    ("used_bytes", "flags", "degraded"),
    [
        pytest.param(20 << 30, (), (), id="room enough"),
        pytest.param(79 << 30, ("throttled",), ("throttled", "tight_memory"), id="too little left"),
        pytest.param(79 << 30, ("tight_memory",), ("tight_memory",), id="flagged already"),
    ],
)
def test_with_headroom(used_bytes: int, flags: tuple[str, ...], degraded: tuple[str, ...]) -> None:
    update = {"reserved_memory_bytes": used_bytes, "device_memory_bytes": used_bytes, "degraded": flags}
    outcome = Measured(measurement=MEASURED.measurement.model_copy(update=update))
    record = with_headroom(RUNNING.model_copy(update={"outcome": outcome}), SPEC, FACTS)
    assert record.measurement is not None
    assert record.measurement.degraded == degraded
