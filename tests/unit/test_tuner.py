"""What an answer makes of its trial, deadlines, names and cache folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autocompile.failure_texts import CACHE_FOLDER, SPARE_CACHE_FOLDER
from autocompile.records import (
    Compile,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Measurement,
    Numerics,
    Stage,
    State,
    StepSeconds,
    Stopped,
    Telemetry,
    TrialRecord,
)
from autocompile.search.treatment import deserves_repeat
from autocompile.space import SearchSpace, defaults
from autocompile.spec import (
    FULL_DEPTH,
    Budget,
    Device,
    Facts,
    Fidelity,
    MeasureRequest,
    Paired,
    Role,
    StudySpec,
    WorkloadSpec,
)
from autocompile.tuner.folders import cache_folder, copy_seed, prepare, with_cache_named
from autocompile.tuner.opening import differences, study_name
from autocompile.tuner.repeats import repeated
from autocompile.tuner.slices import SLICE_SECONDS, slice_seconds, told, with_headroom, with_mfu

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


def test_a_compile_that_the_budget_cut_short_has_its_name_and_may_be_tried_again() -> None:
    record = told(RUNNING, failed(FailureKind.COMPILE_TIMEOUT, "budget"), seconds=7, deadline_seconds=10)
    assert (record.state, record.stopped) == (State.PRUNED, Stopped(reason="budget", bound=7))
    assert record.failure is not None and record.failure.kind is FailureKind.COMPILE_TIMEOUT
    assert deserves_repeat([record])


def test_a_gpu_that_faults_again_does_so_for_its_config() -> None:
    fault = failed(FailureKind.GPU_FAULT)
    first = told(RUNNING, fault, seconds=7, deadline_seconds=60)
    again = RUNNING.model_copy(update={"number": 4})
    assert told(again, fault, [first, again], seconds=7, deadline_seconds=60).state is State.PRUNED
    other = again.model_copy(update={"config": {**defaults(), "micro_batch": 8}})
    assert told(other, fault, [first, other], seconds=7, deadline_seconds=60).state is State.FAIL


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


REQUEST = MeasureRequest(
    workload=SPEC.workload,
    config=defaults(),
    role=Role.CONFIRM,
    fidelity=FULL_DEPTH,
    seed=0,
    devices=(),
    deadline_seconds=60,
    cache_folder="/studies/s/cache/abc",
)
COMPARED = MEASURED.model_copy(update={"telemetry": Telemetry(numerics=Numerics(checked=True))})


def ended(outcome: Measured | Failed, **fields: object) -> TrialRecord:
    return told(RUNNING, outcome, seconds=7, deadline_seconds=60).model_copy(update=fields)


@pytest.mark.parametrize(
    ("records", "update"),
    [
        pytest.param([], {}, id="the first slice"),
        pytest.param([ended(failed(FailureKind.HOST_OOM))], {"compile_threads": 1}, id="killed before"),
        pytest.param(
            [ended(failed(FailureKind.COMPILE_ERROR))],
            {"cache_folder": "/studies/s/cache/abc-1"},
            id="a compile error before: beside the cache that is left aside",
        ),
        pytest.param(
            [ended(failed(FailureKind.HOST_OOM), config={**defaults(), "micro_batch": 8})], {}, id="another config's"
        ),
        pytest.param([ended(COMPARED)], {"numerics": False}, id="compared before"),
        pytest.param([ended(MEASURED)], {}, id="measured and not compared"),
        pytest.param(
            [ended(failed(FailureKind.INFRASTRUCTURE, CACHE_FOLDER), config={**defaults(), "micro_batch": 8})],
            {"cache_folder": f"/scratch/autocompile-{os.getuid()}/abc"},
            id="the disk of the caches broke: for all configs",
        ),
        pytest.param(
            [ended(failed(FailureKind.INFRASTRUCTURE, CACHE_FOLDER), number=1)], {}, id="in an earlier run of the study"
        ),
    ],
)
def test_what_a_slice_is_asked_after_failures(
    records: list[TrialRecord], update: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert repeated(REQUEST, records, first_number=2) == REQUEST.model_copy(update=update)


@pytest.mark.parametrize(
    ("cache", "subkind"),
    [
        pytest.param("/studies/s/cache/abc", CACHE_FOLDER, id="the usual one"),
        pytest.param(f"/scratch/autocompile-{os.getuid()}/abc", SPARE_CACHE_FOLDER, id="the spare one"),
    ],
)
def test_a_broken_cache_folder_is_named(cache: str, subkind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch")
    answer = with_cache_named(
        failed(FailureKind.INFRASTRUCTURE, CACHE_FOLDER), REQUEST.model_copy(update={"cache_folder": cache})
    )
    assert isinstance(answer, Failed)
    assert (answer.failure.subkind, answer.failure.message) == (subkind, f"m (cache folder {cache})")
    assert with_cache_named(MEASURED, REQUEST) == MEASURED


def test_a_cache_folder_that_cannot_be_made_is_told_from_the_slice_s_own(tmp_path: Path) -> None:
    seed, file = tmp_path / "seed", tmp_path / "file"
    seed.mkdir()
    file.write_text("")
    broken = prepare(REQUEST.model_copy(update={"cache_folder": str(file / "abc")}), tmp_path / "trial", seed)
    assert broken is not None
    assert (broken.failure.subkind, broken.failure.message) == (CACHE_FOLDER, f"cache folder {file}/abc: File exists")
    lost = prepare(REQUEST, file / "trial", None)
    assert lost is not None
    assert lost.failure.subkind is None


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


@pytest.mark.parametrize(
    ("flops_per_second", "ceiling", "mfu"),
    [
        pytest.param(300e12, 750e12, 0.4, id="a share of what a matrix product reaches"),
        pytest.param(None, 750e12, None, id="arithmetic that could not be counted"),
        pytest.param(300e12, None, None, id="no matrix product to compare with"),
    ],
)
def test_with_mfu(flops_per_second: float | None, ceiling: float | None, mfu: float | None) -> None:
    update = {"model_flops_per_second": flops_per_second}
    outcome = Measured(measurement=MEASURED.measurement.model_copy(update=update))
    facts = FACTS.model_copy(update={"matmul_flops_per_second": ceiling})
    record = with_mfu(RUNNING.model_copy(update={"outcome": outcome}), facts)
    assert record.measurement is not None
    assert record.measurement.mfu == mfu
