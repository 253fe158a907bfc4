"""Exit status, last progress and log become the failure of a slice that left no answer."""

from __future__ import annotations

import pytest

from autocompile.executors.deadlines import Overdue
from autocompile.executors.exits import BUDGET, INTERRUPTED, Ending, failure_of
from autocompile.failure_texts import CACHE_FOLDER, COMPILE_WORKERS, NO_COMPILER
from autocompile.records import Failure, FailureKind, Progress, Stage
from tests.unit.failure_lines import DISGUISED, NEVER_OOM, PLAIN

GIB = 1 << 30
DEVICE = 80 * GIB

TRACEBACK = "Traceback (most recent call last):"


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


@pytest.mark.parametrize("log", PLAIN)
def test_a_plain_text_is_out_of_memory_on_any_device(log: str) -> None:
    assert failure(1, log, share=0.20).kind is FailureKind.OOM


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
        pytest.param(1, NEVER_OOM[3], FailureKind.HOST_OOM, id="the host's allocator"),
        pytest.param(-6, NEVER_OOM[4], FailureKind.HOST_OOM, id="the host's allocator, uncaught"),
        pytest.param(1, NEVER_OOM[5], FailureKind.INFRASTRUCTURE, id="a port in use"),
        pytest.param(-6, "terminate called ...'std::bad_alloc'", FailureKind.HOST_OOM, id="no memory in C++"),
        pytest.param(1, "OSError: [Errno 12] Cannot allocate memory", FailureKind.HOST_OOM, id="no memory to fork"),
        pytest.param(1, NEVER_OOM[1], FailureKind.COMPILE_ERROR, id="shared memory of the chip"),
        pytest.param(1, NEVER_OOM[2], FailureKind.COMPILE_ERROR, id="shared memory of the chip, in torch's words"),
        pytest.param(
            -11,
            "No valid triton configs. OutOfMemoryError: out of resource: triton_mm\nIgnoring this choice.\n",
            FailureKind.UNKNOWN,
            id="a candidate of autotuning that did not fit",
        ),
        pytest.param(
            1,
            f"no CUDA out of memory so far\nread: No space left on device\nXid 7\n{TRACEBACK}\nValueError: x",
            FailureKind.UNKNOWN,
            id="notes before a traceback",
        ),
        pytest.param(
            1,
            f"{TRACEBACK}\n{PLAIN[0]}\ngoing on without\n{TRACEBACK}\nValueError: x",
            FailureKind.UNKNOWN,
            id="an error that was handled",
        ),
        pytest.param(
            1,
            f"{TRACEBACK}\n{PLAIN[0]}\n\nThe above exception was the direct cause of the following exception:\n\n"
            f"{TRACEBACK}\nValueError: x",
            FailureKind.OOM,
            id="what it was raised from",
        ),
        pytest.param(
            1,
            f"[rank1]:[E901 Cuda.cpp:1] an illegal memory access was encountered\n[rank1]: {TRACEBACK}\n"
            "[rank1]: RuntimeError: x",
            FailureKind.GPU_FAULT,
            id="lines of a rank",
        ),
        pytest.param(
            1,
            f"{PLAIN[-1].splitlines()[0]}\n{TRACEBACK}\nRuntimeError: x",
            FailureKind.OOM,
            id="a warning of C++ before a traceback",
        ),
        pytest.param(
            1,
            "RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run.",
            FailureKind.COMPILE_ERROR,
            id="an output of a CUDA graph that is gone",
        ),
        pytest.param(
            1,
            "torch._inductor.exc.GPUTooOldForTriton: Found Tesla P4 which is too old to be supported by the triton GPU "
            "compiler",
            FailureKind.BACKEND_UNSUPPORTED,
            id="a GPU that triton does not know",
        ),
        pytest.param(
            1,
            "torch.utils.checkpoint.CheckpointError: x",
            FailureKind.COMPILE_ERROR,
            id="another graph when recomputed",
        ),
        pytest.param(
            1, "torch._dynamo.exc.FailOnRecompileLimitHit: Hard failure", FailureKind.RECOMPILE_STORM, id="limit"
        ),
        pytest.param(1, "torch._dynamo.exc.Unsupported: Data-dependent", FailureKind.GRAPH_BREAK, id="graph break"),
        pytest.param(
            1,
            "torch._dynamo.exc.TorchRuntimeError: got RuntimeError('No available kernel.  Aborting execution.')",
            FailureKind.BACKEND_UNSUPPORTED,
            id="no attention kernel",
        ),
        pytest.param(
            1, "torch._inductor.exc.InductorError: LoweringException: x", FailureKind.COMPILE_ERROR, id="compiler bug"
        ),
        pytest.param(
            -11,
            'Fatal Python error: Segmentation fault\n  File "/x/torch/cuda/graphs.py", line 3 in f\n\n'
            "Extension modules: numpy, cuda_utils (total: 2)",
            FailureKind.UNKNOWN,
            id="names of modules say nothing of the GPU",
        ),
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
        pytest.param(
            Ending(cause=Overdue.COMPILE, bound=20, cut_short=True),
            FailureKind.COMPILE_TIMEOUT,
            BUDGET,
            id="no first step in what the budget left",
        ),
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


@pytest.mark.parametrize(
    ("log", "subkind"),
    [
        pytest.param("OSError: [Errno 28] No space left on device", CACHE_FOLDER, id="disk full"),
        pytest.param("OSError: [Errno 30] Read-only file system: '/x'", CACHE_FOLDER, id="disk read-only"),
        pytest.param("x.so: failed to map segment from shared object", CACHE_FOLDER, id="disk mounted noexec"),
        pytest.param("InvalidCxxCompiler: No working C++ compiler found in None", NO_COMPILER, id="no compiler"),
        pytest.param("concurrent.futures.process.BrokenProcessPool: A process", COMPILE_WORKERS, id="dead workers"),
    ],
)
def test_what_the_machine_lacks_has_a_name(log: str, subkind: str) -> None:
    found = failure(1, log)
    assert (found.kind, found.subkind) == (FailureKind.INFRASTRUCTURE, subkind)


def test_the_place_is_the_last_line_of_the_users_code() -> None:
    frames = [("/lib/python3.11/runpy.py", 88), ("/home/me/train.py", 12), ("/home/me/model.py", 7)]
    frames += [("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 1), ("<string>", 1)]
    log = "".join(f'  File "{file}", line {line}, in f\n    call()\n' for file, line in frames)
    assert failure(1, f"Traceback (most recent call last):\n{log}ValueError: x").where == "/home/me/model.py:7"
    assert failure(1, "ValueError: x").where is None


def test_a_crash_is_told_by_its_cause_and_not_by_the_list_of_modules_after_it() -> None:
    frames = '  File "/home/me/model.py", line 7 in f\n\nExtension modules: numpy\n'
    found = failure(-11, f"Fatal Python error: Segmentation fault\n\n{frames}")
    assert found.message == "crashed with SIGSEGV: Fatal Python error: Segmentation fault"
    assert found.where == "/home/me/model.py:7"


def test_the_message_is_one_line_and_ends_with_the_log_s_last_words() -> None:
    found = failure(3, "Traceback (most recent call last):\n  File x\nValueError: no such layer\n\n")
    assert found.message == "exit status 3 and no answer: ValueError: no such layer"
