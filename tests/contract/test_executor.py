"""What every executor promises: an answer of the right type, whatever the slice does, and nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autocompile.executors import Executor
from autocompile.executors.deadlines import Limits
from autocompile.executors.local import LocalExecutor
from autocompile.records import Answer, Failed, FailureKind, Measured, Stage
from autocompile.space import defaults
from autocompile.spec import FULL_DEPTH, Facts, MeasureRequest, PreflightRequest, Role, WorkloadSpec
from tests.contract.fake_child import make_python

# Times that let a hang be seen in a test and not on a busy machine
LIMITS = Limits(compile_seconds=1.5, step_seconds=1.5, recompile_factor=1.0, exit_seconds=0.5)

Make = Callable[[threading.Event], Executor]


def local(folder: Path) -> Make:
    python = make_python(folder)
    return lambda stop: LocalExecutor(python, stop, limits=LIMITS, warm=False)


def forked(folder: Path) -> Make:
    python = make_python(folder, warm=True)
    return lambda stop: LocalExecutor(python, stop, limits=LIMITS)


@pytest.fixture(params=[pytest.param(local, id="local"), pytest.param(forked, id="forked")])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    made: Make = request.param(tmp_path)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "trial"
    path.mkdir()
    return path


def measure(folder: Path, *, deadline_seconds: float = 30, **options: Any) -> MeasureRequest:
    return MeasureRequest(
        workload=WorkloadSpec(model="tiny-llama", options=options),
        config=defaults(),
        role=Role.SEARCH,
        fidelity=FULL_DEPTH,
        seed=0,
        devices=(),
        deadline_seconds=deadline_seconds,
        cache_folder=str(folder.parent / "cache" / "of-config"),
    )


def preflight(folder: Path, **options: Any) -> PreflightRequest:
    return PreflightRequest(
        workload=WorkloadSpec(model="tiny-llama", options=options),
        seed=0,
        devices=(),
        deadline_seconds=30,
        cache_folder=str(folder.parent / "cache" / "seed"),
    )


def kind_of(answer: Answer) -> FailureKind:
    assert isinstance(answer, Failed), answer
    return answer.failure.kind


def test_a_measurement_comes_back(make: Make, folder: Path) -> None:
    answer = make(threading.Event()).run(measure(folder), folder)
    assert isinstance(answer, Measured)
    assert answer.measurement.tokens_per_second == pytest.approx(1000)


def test_facts_come_back(make: Make, folder: Path) -> None:
    answer = make(threading.Event()).run(preflight(folder, fake_device="cuda", fake_gpus=2), folder)
    assert isinstance(answer, Facts)
    assert len(answer.devices) == 2


def test_a_failure_of_the_slice_s_own_comes_back(make: Make, folder: Path) -> None:
    assert kind_of(make(threading.Event()).run(measure(folder, fake="oom"), folder)) is FailureKind.OOM


def test_a_failed_preflight_comes_back(make: Make, folder: Path) -> None:
    request = preflight(folder, fake_preflight="workload_error")
    assert kind_of(make(threading.Event()).run(request, folder)) is FailureKind.WORKLOAD_ERROR


def test_the_folder_replays_by_hand(make: Make, folder: Path) -> None:
    request = measure(folder)
    make(threading.Event()).run(request, folder)
    assert MeasureRequest.model_validate_json((folder / "request.json").read_text()) == request
    assert (folder / "log.txt").exists()
    assert Path(request.cache_folder).is_dir()


@pytest.mark.parametrize(
    ("options", "kind", "stage"),
    [
        pytest.param({"fake": "text"}, FailureKind.UNKNOWN, Stage.WARMUP, id="exit 1 without an answer"),
        pytest.param({"fake": "kill"}, FailureKind.HOST_OOM, Stage.WARMUP, id="killed from outside"),
        pytest.param({"fake": "crash"}, FailureKind.UNKNOWN, Stage.WARMUP, id="segfault"),
        pytest.param(
            {"fake": "crash", "fake_text": "in libtorch_cuda.so"}, FailureKind.GPU_FAULT, Stage.WARMUP, id="GPU crash"
        ),
        pytest.param({"fake": "half_written"}, FailureKind.INFRASTRUCTURE, Stage.BUILD, id="half-written answer"),
        pytest.param({"fake": "facts_instead"}, FailureKind.INFRASTRUCTURE, Stage.BUILD, id="answer of another type"),
        pytest.param({"fake": "hang_in_compile"}, FailureKind.COMPILE_TIMEOUT, Stage.COMPILE, id="hang in compile"),
        pytest.param({"fake": "hang_in_step"}, FailureKind.HANG, Stage.MEASURE, id="hang in a step"),
        pytest.param(
            {"fake": "text", "fake_text": "torch.OutOfMemoryError: CUDA out of memory."},
            FailureKind.OOM,
            Stage.WARMUP,
            id="out of memory in the log",
        ),
    ],
)
def test_a_slice_without_an_answer_becomes_a_failure(
    make: Make, folder: Path, options: dict[str, Any], kind: FailureKind, stage: Stage
) -> None:
    answer = make(threading.Event()).run(measure(folder, **options), folder)
    assert kind_of(answer) is kind
    assert isinstance(answer, Failed)
    assert answer.failure.stage is stage


@pytest.mark.parametrize(
    ("share", "kind"),
    [
        pytest.param(0.97, FailureKind.OOM, id="full"),
        pytest.param(0.20, FailureKind.GPU_FAULT, id="mostly empty"),
    ],
)
def test_a_disguised_out_of_memory_is_known_by_the_last_progress(
    make: Make, folder: Path, share: float, kind: FailureKind
) -> None:
    executor = make(threading.Event())
    executor.run(preflight(folder, fake_device="cuda"), folder)
    request = measure(folder, fake="text", fake_text="CUBLAS_STATUS_ALLOC_FAILED", fake_share=share)
    assert kind_of(executor.run(request, folder)) is kind


def test_the_slice_s_time_is_kept_even_without_progress(make: Make, folder: Path) -> None:
    began = time.monotonic()
    answer = make(threading.Event()).run(measure(folder, fake="hang", deadline_seconds=1), folder)
    assert isinstance(answer, Failed)
    assert answer.failure.subkind == "budget"
    assert time.monotonic() - began < 5


def test_stopping_ends_the_slice(make: Make, folder: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    began = time.monotonic()
    answer = make(stop).run(measure(folder, fake="hang"), folder)
    assert isinstance(answer, Failed)
    assert answer.failure.subkind == "interrupted"
    assert time.monotonic() - began < 5


def test_an_answer_counts_though_the_slice_hangs_at_its_exit(make: Make, folder: Path) -> None:
    began = time.monotonic()
    assert isinstance(make(threading.Event()).run(measure(folder, fake="hang_at_exit"), folder), Measured)
    assert time.monotonic() - began < 10


def test_an_answer_of_an_earlier_slice_does_not_count(make: Make, folder: Path) -> None:
    executor = make(threading.Event())
    executor.run(measure(folder), folder)
    assert kind_of(executor.run(measure(folder, fake="text"), folder)) is FailureKind.UNKNOWN


def test_grandchildren_in_sessions_of_their_own_are_ended(make: Make, folder: Path) -> None:
    assert isinstance(make(threading.Event()).run(measure(folder, fake="leave_children"), folder), Measured)
    pids = (folder / "grandchildren.txt").read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_folder_that_cannot_be_written_blames_the_machine(make: Make, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert kind_of(make(threading.Event()).run(measure(in_the_way / "x"), in_the_way)) is FailureKind.INFRASTRUCTURE


def is_alive(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
