"""Exit status, last progress and log become the failure of a slice that left no answer."""

from __future__ import annotations

import pytest

from autocompile.executors.deadlines import Overdue
from autocompile.executors.exits import BUDGET, INTERRUPTED, Ending, failure_of
from autocompile.records import Failure, FailureKind, Progress, Stage

GIB = 1 << 30
DEVICE = 80 * GIB

DISGUISED = [
    "RuntimeError: CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "torch.AcceleratorError: cudaErrorMemoryAllocation",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "RuntimeError: GET was unable to find an engine. Unable to find an engine to execute this computation",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1156',
    "!handles_.at(i) INTERNAL ASSERT FAILED",
    "RuntimeError: CUDA driver error: device not ready",
    "node1: NCCL WARN Cuda failure 'out of memory'",
    "NCCL WARN Failed to CUDA calloc 6291456 bytes",
    "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp",
    "terminate called after throwing an instance of 'c10::Error'",
]
NEVER_OOM = [
    "RuntimeError: CUDA error: device-side assert triggered",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 101376",
    "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 109951162777 bytes. Error code 12",
    "OSError: [Errno 98] Address already in use",
]


def failure(status: int, log: str = "", *, share: float | None = None, told: bool = True) -> Failure:
    memory = None if share is None else int(share * DEVICE)
    progress = Progress(stage=Stage.WARMUP, step=3, device_memory_bytes=memory, time=0.0) if told else None
    ending = Ending(status=status)
    return failure_of(ending, progress, log_tail=log, first_stage=Stage.BUILD, device_memory_bytes=DEVICE)


@pytest.mark.parametrize("log", DISGUISED)
@pytest.mark.parametrize("status", [1, -6])
def test_a_disguised_text_is_out_of_memory_on_a_full_device_only(log: str, status: int) -> None:
    assert failure(status, log, share=0.97).kind is FailureKind.OOM
    assert failure(status, log, share=0.20).kind is FailureKind.GPU_FAULT
    assert failure(status, log).kind is FailureKind.GPU_FAULT
    plain = f"torch.OutOfMemoryError: CUDA out of memory.\n{log}"
    assert failure(status, plain, share=0.20).kind is FailureKind.OOM


@pytest.mark.parametrize("log", NEVER_OOM)
def test_a_text_that_is_never_out_of_memory(log: str) -> None:
    assert failure(1, log, share=0.97).kind is not FailureKind.OOM


@pytest.mark.parametrize(
    ("status", "log", "kind"),
    [
        pytest.param(-9, "", FailureKind.HOST_OOM, id="killed from outside"),
        pytest.param(137, "", FailureKind.HOST_OOM, id="killed from outside, told by a shell"),
        pytest.param(-15, "", FailureKind.INFRASTRUCTURE, id="asked to end from outside"),
        pytest.param(-11, "Fatal Python error: in libtorch_cuda.so", FailureKind.GPU_FAULT, id="segfault in CUDA"),
        pytest.param(139, "cublas", FailureKind.GPU_FAULT, id="segfault in CUDA, told by a shell"),
        pytest.param(-6, "CUDA error: device-side assert triggered", FailureKind.GPU_FAULT, id="abort in CUDA"),
        pytest.param(-11, "Fatal Python error: Segmentation fault", FailureKind.UNKNOWN, id="segfault elsewhere"),
        pytest.param(-6, "CUDA out of memory.", FailureKind.OOM, id="abort after a plain line"),
        pytest.param(1, "torch.OutOfMemoryError: CUDA out of memory.", FailureKind.OOM, id="plain line"),
        pytest.param(1, "MPS backend out of memory (MPS allocated", FailureKind.OOM, id="plain line of Apple"),
        pytest.param(1, "RuntimeError: CUDA error: invalid argument", FailureKind.GPU_FAULT, id="any CUDA error"),
        pytest.param(1, "CUBLAS_STATUS_EXECUTION_FAILED", FailureKind.GPU_FAULT, id="any cuBLAS status"),
        pytest.param(1, "an illegal memory access was encountered", FailureKind.GPU_FAULT, id="illegal access"),
        pytest.param(1, NEVER_OOM[2], FailureKind.HOST_OOM, id="the host's allocator"),
        pytest.param(1, NEVER_OOM[3], FailureKind.INFRASTRUCTURE, id="a port in use"),
        pytest.param(1, "OSError: [Errno 28] No space left on device", FailureKind.INFRASTRUCTURE, id="disk full"),
        pytest.param(1, "CUDA graphs were skipped\nKeyError: 'x'", FailureKind.UNKNOWN, id="CUDA alone says nothing"),
        pytest.param(0, "", FailureKind.UNKNOWN, id="exit 0 without an answer"),
        pytest.param(127, "", FailureKind.UNKNOWN, id="127 of a slice that had begun"),
    ],
)
def test_kind(status: int, log: str, kind: FailureKind) -> None:
    assert failure(status, log).kind is kind


@pytest.mark.parametrize(
    ("status", "log"),
    [
        pytest.param(127, "sh: exec: python9: not found", id="the shell found no interpreter"),
        pytest.param(126, "sh: python: Permission denied", id="the shell may not run it"),
        pytest.param(1, "ModuleNotFoundError: No module named 'torch'", id="no torch in the interpreter"),
    ],
)
def test_a_slice_that_never_began_blames_the_machine(status: int, log: str) -> None:
    found = failure(status, log, told=False)
    assert (found.kind, found.stage) == (FailureKind.INFRASTRUCTURE, Stage.BUILD)
    assert log in found.message


@pytest.mark.parametrize(
    ("ending", "kind", "subkind"),
    [
        pytest.param(Ending(cause=Overdue.COMPILE, bound=900), FailureKind.COMPILE_TIMEOUT, None, id="no first step"),
        pytest.param(Ending(cause=Overdue.STEP, bound=60), FailureKind.HANG, None, id="no next step"),
        pytest.param(Ending(cause=Overdue.SLICE, bound=30), FailureKind.INFRASTRUCTURE, BUDGET, id="budget"),
        pytest.param(Ending(interrupted=True), FailureKind.INFRASTRUCTURE, INTERRUPTED, id="interruption"),
    ],
)
def test_an_end_that_we_made_is_not_read_from_the_log(ending: Ending, kind: FailureKind, subkind: str | None) -> None:
    progress = Progress(stage=Stage.COMPILE, step=0, time=0.0)
    log = "CUDA out of memory"
    found = failure_of(ending, progress, log_tail=log, first_stage=Stage.BUILD, device_memory_bytes=None)
    assert (found.kind, found.subkind, found.stage) == (kind, subkind, Stage.COMPILE)


@pytest.mark.parametrize(
    ("reserved", "device", "full"),
    [
        pytest.param(None, 97, True, id="full by the driver's count"),
        pytest.param(97, 98, True, id="full of our own"),
        pytest.param(20, 22, False, id="mostly empty, ours nearly all that is used"),
        pytest.param(20, 100, False, id="mostly empty, the total told as used"),
        pytest.param(None, None, False, id="not told"),
    ],
)
def test_how_full_a_device_is(reserved: int | None, device: int | None, full: bool) -> None:
    progress = Progress(
        stage=Stage.WARMUP, step=1, reserved_memory_bytes=reserved, device_memory_bytes=device, time=0.0
    )
    ending = Ending(status=1)
    log = "CUBLAS_STATUS_ALLOC_FAILED"
    found = failure_of(ending, progress, log_tail=log, first_stage=Stage.BUILD, device_memory_bytes=100)
    assert found.kind is (FailureKind.OOM if full else FailureKind.GPU_FAULT)


def test_the_message_is_one_line_and_ends_with_the_log_s_last_words() -> None:
    found = failure(3, "Traceback (most recent call last):\n  File x\nValueError: no such layer\n\n")
    assert found.message == "exit status 3 and no answer: ValueError: no such layer"
