"""Decisions inside a slice that need no model: naming failures, merging ranks, intervals, hashes of output code."""

from __future__ import annotations

import errno
import random
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from pydantic import ValidationError
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchRuntimeError, Unsupported, UserError, UserErrorType
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

from autocompile.records import Compile, Failed, Failure, FailureKind, Measured, Measurement, Stage, StepSeconds
from autocompile.slice.classify import classify
from autocompile.slice.cycles import tokens_of_cycles
from autocompile.slice.measure import RecompileStorm, median_interval
from autocompile.slice.merge import RankOutcome, merge
from autocompile.slice.parity import NumericsMismatch, Reference, compare, dropout_off, require_finite
from autocompile.slice.telemetry import code_hash, sdpa_kernels
from autocompile.workloads.job import Job, MachineFault, WorkloadError
from tests.unit.failure_lines import DISGUISED, NEVER_OOM


class RecompileLimitExceeded(Exception):
    """Known by its name: this torch has another class for it."""


def nested(outer: BaseException, inner: BaseException) -> BaseException:
    """As torch raises them: the cause only in ``__context__``."""
    outer.__context__ = inner
    return outer


def inductor(inner: Exception) -> InductorError:
    return InductorError(inner, None)


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        pytest.param(OOM, FailureKind.OOM, id="plain out of memory"),
        pytest.param(nested(inductor(ValueError("x")), OOM), FailureKind.OOM, id="out of memory inside the compiler"),
        pytest.param(inductor(OOM), FailureKind.OOM, id="out of memory as inner exception"),
        pytest.param(inductor(InvalidCxxCompiler()), FailureKind.INFRASTRUCTURE, id="no compiler, wrapped by inductor"),
        pytest.param(
            inductor(OSError(errno.ENOSPC, "No space left on device")), FailureKind.INFRASTRUCTURE, id="disk full"
        ),
        pytest.param(
            inductor(ImportError("x.so: failed to map segment from shared object")),
            FailureKind.INFRASTRUCTURE,
            id="cache folder mounted noexec",
        ),
        pytest.param(FailOnRecompileLimitHit("Hard failure"), FailureKind.RECOMPILE_STORM, id="limit under fullgraph"),
        pytest.param(RecompileStorm("limit hit"), FailureKind.RECOMPILE_STORM, id="our own storm"),
        pytest.param(
            Unsupported("Data-dependent branching", "", []), FailureKind.GRAPH_BREAK, id="break under fullgraph"
        ),
        pytest.param(
            RuntimeError("No viable backend for scaled_dot_product_attention was found."),
            FailureKind.BACKEND_UNSUPPORTED,
            id="no attention kernel, eager",
        ),
        pytest.param(
            TorchRuntimeError("RuntimeError('No available kernel.  Aborting execution.')"),
            FailureKind.BACKEND_UNSUPPORTED,
            id="no attention kernel, compiled",
        ),
        pytest.param(CppCompileError(["g++"], "x"), FailureKind.COMPILE_ERROR, id="C++ error"),
        pytest.param(inductor(ValueError("lowering")), FailureKind.COMPILE_ERROR, id="compiler bug"),
        pytest.param(
            RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run"),
            FailureKind.COMPILE_ERROR,
            id="CUDA graph output overwritten",
        ),
        pytest.param(
            RuntimeError("OutOfResources: out of resource: shared memory, Required: 262144"),
            FailureKind.COMPILE_ERROR,
            id="shared memory of the chip is not device memory",
        ),
        pytest.param(
            RuntimeError("CUDA error: device-side assert triggered"), FailureKind.GPU_FAULT, id="device assert"
        ),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            FailureKind.HOST_OOM,
            id="host memory",
        ),
        pytest.param(NumericsMismatch("NaN"), FailureKind.NUMERICS_MISMATCH, id="wrong numbers"),
        pytest.param(WorkloadError("no Job"), FailureKind.WORKLOAD_ERROR, id="user's script"),
        pytest.param(MachineFault("no GPU"), FailureKind.INFRASTRUCTURE, id="machine"),
        pytest.param(
            OSError(errno.EADDRINUSE, "Address already in use"), FailureKind.INFRASTRUCTURE, id="a port in use"
        ),
        pytest.param(
            OSError(errno.EACCES, "Permission denied", "/data/tokens.bin"),
            FailureKind.UNKNOWN,
            id="the user's own file",
        ),
        pytest.param(OSError(errno.ENOMEM, "Cannot allocate memory"), FailureKind.HOST_OOM, id="no memory to fork"),
        pytest.param(
            inductor(BrokenProcessPool("A process in the process pool was terminated abruptly")),
            FailureKind.INFRASTRUCTURE,
            id="a compile worker died",
        ),
        pytest.param(
            inductor(CppCompileError(["g++"], "g++: fatal error: Killed signal terminated program cc1plus")),
            FailureKind.HOST_OOM,
            id="the compiler was killed",
        ),
        pytest.param(
            nested(WorkloadError("train.py: build: RuntimeError"), RuntimeError("CUDA error: misaligned address")),
            FailureKind.GPU_FAULT,
            id="a broken device while a script builds",
        ),
        pytest.param(
            nested(WorkloadError("train.py: build: MemoryError"), MemoryError()),
            FailureKind.HOST_OOM,
            id="host memory while a script builds",
        ),
        pytest.param(
            RuntimeError("torch.compile with fullgraph=True found no compiled frames."),
            FailureKind.GRAPH_BREAK,
            id="nothing to compile under fullgraph",
        ),
        pytest.param(
            UserError(UserErrorType.DYNAMIC_CONTROL_FLOW, "Could not guard on data-dependent expression"),
            FailureKind.GRAPH_BREAK,
            id="dynamo's complaint about the user's code",
        ),
        pytest.param(
            RecompileLimitExceeded("recompile_limit reached"), FailureKind.RECOMPILE_STORM, id="limit of another torch"
        ),
        pytest.param(
            AssertionError("expected size 64==64, stride 16384==1 at dim=1"),
            FailureKind.COMPILE_ERROR,
            id="a layout that generated code did not expect",
        ),
        pytest.param(
            RuntimeError("mha_graph.execute(handle, variant_pack, workspace_ptr.get()).is_good()"),
            FailureKind.BACKEND_UNSUPPORTED,
            id="cuDNN's attention refuses",
        ),
        pytest.param(KeyError("x"), FailureKind.UNKNOWN, id="anything else"),
    ],
)
def test_classify(error: BaseException, kind: FailureKind) -> None:
    failure = classify(error, stage=Stage.COMPILE, memory_share=0.2)
    assert (failure.kind, failure.stage) == (kind, Stage.COMPILE)
    assert "\n" not in failure.message and failure.message


@pytest.mark.parametrize("text", DISGUISED)
def test_ambiguous_cuda_text_is_out_of_memory_only_on_a_full_device(text: str) -> None:
    full = classify(RuntimeError(text), stage=Stage.WARMUP, memory_share=0.97)
    roomy = classify(RuntimeError(text), stage=Stage.WARMUP, memory_share=0.2)
    assert full.kind is FailureKind.OOM
    assert roomy.kind is FailureKind.GPU_FAULT


@pytest.mark.parametrize("text", NEVER_OOM)
def test_a_text_that_is_never_out_of_memory(text: str) -> None:
    assert classify(RuntimeError(text), stage=Stage.WARMUP, memory_share=0.97).kind is not FailureKind.OOM


def test_where_is_the_users_line() -> None:
    try:
        raise WorkloadError("boom")
    except WorkloadError as error:
        where = classify(error, stage=Stage.BUILD, memory_share=0).where
    assert where is not None and where.startswith(f"{__file__}:")


def measured(seconds: float, **fields: object) -> Measured:
    return Measured(
        measurement=Measurement(
            **fields,
            tokens_per_second=1 / seconds,
            step_seconds=StepSeconds(median=seconds, low=seconds, high=seconds, n=5),
            compile=Compile(seconds=0, cold_seconds=0, cache="none"),
        )
    )


def failed(message: str, kind: FailureKind = FailureKind.UNKNOWN) -> Failed:
    return Failed(failure=Failure(kind=kind, stage=Stage.WARMUP, message=message))


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        pytest.param([measured(1.0)], 0, id="one rank speaks for itself"),
        pytest.param(
            [failed("Connection closed by peer"), failed("CUDA out of memory")], 1, id="cause before its echo"
        ),
        pytest.param([failed("a"), failed("b")], 0, id="the earliest cause"),
        pytest.param(
            [failed("NCCL error: remote process exited or there was a network error"), failed("a")],
            1,
            id="cause before NCCL's echo",
        ),
        pytest.param([measured(1.0), failed("a")], 1, id="one failure fails all"),
        pytest.param([failed("Timed out waiting 15000ms")], 0, id="an echo alone is still a failure"),
    ],
)
def test_merge(outcomes: list[Measured | Failed], expected: int) -> None:
    ranks = [RankOutcome(rank=rank, time=float(rank), outcome=outcome) for rank, outcome in enumerate(outcomes)]
    assert merge(ranks) == outcomes[expected]


@pytest.mark.parametrize("speed", [float("inf"), float("nan"), 1e308, 0.0, -1.0])
def test_a_speed_is_a_number_that_can_be(speed: float) -> None:
    document = measured(1.0).model_dump() | {"measurement": {**measured(1.0).measurement.model_dump()}}
    document["measurement"]["tokens_per_second"] = speed
    with pytest.raises(ValidationError, match="tokens_per_second"):
        Measured.model_validate(document)


def test_half_a_surrogate_pair_in_a_message_can_be_written() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory in \udcff")
    found = classify(error, stage=Stage.WARMUP, memory_share=0)
    assert found.kind is FailureKind.OOM
    assert "CUDA out of memory in ?" in found.model_dump_json()


def test_ranks_together() -> None:
    """One step of all of them takes as long as the slowest's."""
    each = [
        measured(1.0, peak_memory_bytes=5, reserved_memory_bytes=9, losses=(4.0, 3.0), degraded=("throttled",)),
        measured(1.2, peak_memory_bytes=7, reserved_memory_bytes=8, losses=(2.0, 2.0)),
    ]
    outcome = merge([RankOutcome(rank=rank, time=0.0, outcome=outcome) for rank, outcome in enumerate(each)])
    assert isinstance(outcome, Measured)
    found = outcome.measurement
    assert (found.step_seconds.median, found.tokens_per_second) == (1.2, pytest.approx(1 / 1.0 + 1 / 1.2))
    assert (found.peak_memory_bytes, found.peak_memory_bytes_by_rank, found.reserved_memory_bytes) == (7, (5, 7), 9)
    assert (found.losses, found.degraded) == ((3.0, 2.5), ("throttled",))


def test_median_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        found = median_interval([draw.gauss(1.0, 0.1) for _ in range(25)])
        hits += found.low <= 1.0 <= found.high
    assert 0.93 <= hits / 2000 <= 0.99


def test_median_interval_of_one_sample_is_that_sample() -> None:
    found = median_interval([0.5])
    assert (found.median, found.low, found.high, found.n) == (0.5, 0.5, 0.5, 1)


CODE = """
# AOT ID: ['0_forward']
import torch
async_compile.cpp_pybinding([], r'''
#include "/tmp/one/ab/cpp_prefix.h"
''')
def call(args):
    buf0 = x + 1  # Source Nodes: [add]
    return buf0
"""


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param(CODE.replace("0_forward", "7_forward"), True, id="another comment"),
        pytest.param(CODE.replace("/tmp/one/ab", "/home/me/cache/xy"), True, id="another folder"),
        pytest.param(CODE.replace("x + 1", "x + 2"), False, id="another operation"),
        pytest.param(CODE.replace("cpp_prefix.h", "other.h"), False, id="another header"),
    ],
)
def test_code_hash(other: str, same: bool) -> None:
    assert (code_hash(other) == code_hash(CODE)) is same


@pytest.mark.parametrize(
    ("names", "found"),
    [
        pytest.param(["aten::add", "aten::mm"], (), id="no attention"),
        pytest.param(
            ["aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_backward"],
            ("_scaled_dot_product_flash_attention_for_cpu",),
            id="forward only",
        ),
        pytest.param(["void pytorch_flash::flash_fwd_kernel<Traits>"], ("flash_fwd_kernel",), id="CUDA flash kernel"),
        pytest.param(
            ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma"],
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma",),
            id="cuDNN kernel",
        ),
    ],
)
def test_sdpa_kernels(names: list[str], found: tuple[str, ...]) -> None:
    assert sdpa_kernels(names) == found


@pytest.mark.parametrize(
    ("first", "eager", "accepted"),
    [
        pytest.param(10.0, 10.1, True, id="one percent apart"),
        pytest.param(10.0, 10.5, False, id="five percent apart"),
        pytest.param(float("nan"), 10.0, False, id="not a number"),
        pytest.param(10.0, float("inf"), False, id="eager itself infinite"),
    ],
)
def test_first_loss_is_compared_with_eager(first: float, eager: float, accepted: bool) -> None:
    if accepted:
        compare(first, Reference(losses=(eager,), spread=0.0))
    else:
        with pytest.raises(NumericsMismatch):
            compare(first, Reference(losses=(eager,), spread=0.0))


@pytest.mark.parametrize(
    ("first", "accepted"),
    [
        pytest.param(2.0, True, id="the mean of the micro-batches"),
        pytest.param(4.0, True, id="their sum"),
        pytest.param(3.0, True, id="the last one"),
        pytest.param(2.5, True, id="a mean weighted by tokens"),
        pytest.param(3.5, False, id="none of these"),
    ],
)
def test_a_step_may_return_its_loss_in_several_ways(first: float, accepted: bool) -> None:
    reference = Reference(losses=(1.0, 3.0), spread=0.0)
    if accepted:
        compare(first, reference)
    else:
        with pytest.raises(NumericsMismatch):
            compare(first, reference)


def test_random_numbers_that_stay_on_widen_the_tolerance() -> None:
    compare(1.2, Reference(losses=(1.0,), spread=0.1))
    with pytest.raises(NumericsMismatch, match="30%"):
        compare(1.4, Reference(losses=(1.0,), spread=0.1))


def test_a_loss_that_is_not_finite_is_named_by_its_step() -> None:
    with pytest.raises(NumericsMismatch, match="step 2"):
        require_finite([1.0, 1.0, float("nan")])


@pytest.mark.parametrize(
    ("n_micro_batches", "before", "n", "tokens"),
    [
        pytest.param(1, 0, 1, [1], id="the first cycle"),
        pytest.param(1, 1, 2, [2, 3], id="the window's own cycles, not the first"),
        pytest.param(2, 0, 2, [3, 7], id="cycles of two micro-batches"),
        pytest.param(1, 3, 2, [4, 1], id="the stream begins again where it ends"),
    ],
)
def test_tokens_are_those_of_the_window(n_micro_batches: int, before: int, n: int, tokens: list[int]) -> None:
    job = Job(
        model=torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch),
        batches=lambda: iter([1, 2, 3, 4]),
        tokens=int,
    )
    passed: list[None] = []
    found = tokens_of_cycles(job, n_micro_batches, before=before, n=n, passed=lambda: passed.append(None))
    assert (found, len(passed)) == (tokens, before + n)


def test_dropout_is_off_inside_and_back_afterwards() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(2, 2))
    model[1].attention_dropout = 0.1  # as transformers' attention modules have it
    with dropout_off(model) as had_dropout:
        assert had_dropout and model[0].p == 0 and model[1].attention_dropout == 0
    assert (model[0].p, model[1].attention_dropout) == (0.3, 0.1)
    with dropout_off(torch.nn.Linear(2, 2)) as had_dropout:
        assert not had_dropout
