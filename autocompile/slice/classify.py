"""Name what went wrong, from the whole exception chain: torch wraps the true class on its way up."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from autocompile.failure_texts import BROKEN_DEVICE, DISGUISED_OOM, FAILED_CALL, NEARLY_FULL, PLAIN_OOM
from autocompile.knobs import NotApplicable
from autocompile.records import Failure, FailureKind, Stage
from autocompile.slice.measure import RecompileStorm
from autocompile.slice.parity import NumericsMismatch
from autocompile.workloads.job import MachineFault, WorkloadError

_MESSAGE_LENGTH = 400


@dataclass(frozen=True)
class _Seen:
    """One exception of the chain, its classes' names and its text."""

    error: BaseException
    classes: frozenset[str]
    text: str
    memory_share: float


def classify(error: BaseException, *, stage: Stage, memory_share: float) -> Failure:
    """The first rule that fits any exception of the chain, outermost first; `unknown` keeps class and text.

    ``memory_share`` is how full the device was, 0 to 1: some CUDA texts mean out of memory only on a full device.
    """
    chain = [
        _Seen(one, frozenset(kind.__name__ for kind in type(one).__mro__), str(one), memory_share)
        for one in exception_chain(error)
    ]
    for rule in _RULES:
        for seen in chain:
            if rule.fits(seen):
                return _failure(rule.kind, seen, stage=stage, where=_where(chain), subkind=rule.subkind)
    return _failure(FailureKind.UNKNOWN, chain[0], stage=stage, where=_where(chain), subkind=type(error).__name__)


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all it was raised from, in, or around: ``__cause__``, ``__context__`` and ``inner_exception``."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        links = (one.__cause__, one.__context__, getattr(one, "inner_exception", None))
        waiting += [link for link in links if isinstance(link, BaseException)]


@dataclass(frozen=True)
class _Rule:
    kind: FailureKind
    fits: Callable[[_Seen], bool]
    subkind: str | None = None


def _classed(*names: str) -> Callable[[_Seen], bool]:
    return lambda seen: not seen.classes.isdisjoint(names)


def _says(pattern: str) -> Callable[[_Seen], bool]:
    wanted = re.compile(pattern)
    return lambda seen: wanted.search(seen.text) is not None


def _disk(seen: _Seen) -> bool:
    full_or_forbidden = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EPERM)
    return isinstance(seen.error, OSError) and seen.error.errno in full_or_forbidden


_SDPA = (
    r"No viable backend for scaled_dot_product_attention|No available kernel\.\s+Aborting execution"
    r"|No execution plans support the graph|cuDNN Frontend error|Explicit attn_mask should not be set when is_causal"
)
_BROKEN_CACHE = r"failed to map segment from shared object|No space left on device|Disk quota exceeded"
_NO_COMPILER = (
    r"No working C\+\+ compiler found|Failed to find C compiler|Cannot find a working triton|Cannot find ptxas"
    r"|Python\.h: No such file"
)
_FULLGRAPH = r"found no compiled frames|Graph break under|fullgraph=True"

# The order matters: what the machine did comes before what the config did, memory before the compiler's wrappers.
_RULES = (
    _Rule(FailureKind.NUMERICS_MISMATCH, _classed(NumericsMismatch.__name__)),
    _Rule(FailureKind.WORKLOAD_ERROR, _classed(WorkloadError.__name__, NotApplicable.__name__)),
    _Rule(FailureKind.INFRASTRUCTURE, _classed(MachineFault.__name__)),
    _Rule(FailureKind.INFRASTRUCTURE, _says(_NO_COMPILER), "no_compiler"),
    _Rule(FailureKind.INFRASTRUCTURE, _says(_BROKEN_CACHE), "cache_folder"),
    _Rule(FailureKind.INFRASTRUCTURE, _disk, "cache_folder"),
    _Rule(FailureKind.OOM, lambda seen: isinstance(seen.error, torch.OutOfMemoryError)),
    _Rule(FailureKind.OOM, _says(PLAIN_OOM)),
    _Rule(FailureKind.OOM, lambda seen: _says(DISGUISED_OOM)(seen) and seen.memory_share > NEARLY_FULL, "disguised"),
    _Rule(FailureKind.GPU_FAULT, _says(f"{BROKEN_DEVICE}|{FAILED_CALL}")),
    _Rule(FailureKind.HOST_OOM, _says(r"DefaultCPUAllocator|Killed signal terminated program")),
    _Rule(FailureKind.HOST_OOM, lambda seen: isinstance(seen.error, MemoryError)),
    _Rule(FailureKind.RECOMPILE_STORM, _classed(RecompileStorm.__name__, "FailOnRecompileLimitHit", "RecompileError")),
    _Rule(FailureKind.RECOMPILE_STORM, _says(r"recompile_limit reached|cache_size_limit reached")),
    _Rule(FailureKind.BACKEND_UNSUPPORTED, _says(_SDPA), "sdpa"),
    _Rule(FailureKind.BACKEND_UNSUPPORTED, _classed("GPUTooOldForTriton"), "gpu_too_old"),
    _Rule(
        FailureKind.COMPILE_ERROR, _says(r"tensor output of CUDAGraphs that has been overwritten"), "cudagraph_liveness"
    ),
    _Rule(
        FailureKind.COMPILE_ERROR, _says(r"graph recording observed an input tensor deallocate"), "cudagraph_checkpoint"
    ),
    _Rule(FailureKind.COMPILE_ERROR, _classed("CheckpointError"), "checkpoint_mismatch"),
    _Rule(FailureKind.GRAPH_BREAK, _classed("Unsupported", "UserError", "UncapturedHigherOrderOpError")),
    _Rule(FailureKind.GRAPH_BREAK, lambda seen: _classed("TorchDynamoException")(seen) and _says(_FULLGRAPH)(seen)),
    _Rule(
        FailureKind.COMPILE_ERROR,
        _classed("TorchDynamoException", "OperatorIssue", "ShortenTraceback", "CppCompileError", "NoValidChoicesError"),
    ),
    _Rule(
        FailureKind.COMPILE_ERROR, _says(r"OutOfResources|out of resource: shared memory|ptxas fatal|LoweringException")
    ),
)


_OURS = (MachineFault, NotApplicable, NumericsMismatch, RecompileStorm, WorkloadError)  # their text is the message


def _failure(kind: FailureKind, seen: _Seen, *, stage: Stage, where: str | None, subkind: str | None) -> Failure:
    name = type(seen.error).__name__
    first = next((line.strip() for line in seen.text.splitlines() if line.strip()), "")
    plain = isinstance(seen.error, _OURS)
    message = first if plain else f"{name}: {first}" if first else name
    return Failure(kind=kind, stage=stage, message=message[:_MESSAGE_LENGTH], subkind=subkind, where=where)


def _where(chain: list[_Seen]) -> str | None:
    """file:line of the deepest frame that is neither ours nor an installed library's."""
    for seen in chain:
        where = getattr(seen.error, "where", None)
        if isinstance(where, str):
            return where
    for seen in chain:
        if match := re.search(r'from user code:\n\s+File "([^"]+)", line (\d+)', seen.text):
            inner = re.findall(r'File "([^"]+)", line (\d+)', seen.text[match.start() :])
            return f"{inner[-1][0]}:{inner[-1][1]}"
    package = str(Path(__file__).parent.parent)
    for seen in chain:
        frames = traceback.extract_tb(seen.error.__traceback__)
        for frame in reversed(frames):
            if not frame.filename.startswith((package, "<")) and "site-packages" not in frame.filename:
                return f"{frame.filename}:{frame.lineno}"
    return None
