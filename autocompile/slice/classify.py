"""Name what went wrong, from the whole exception chain: torch wraps the true class on its way up."""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from autocompile import failure_texts as texts
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
                subkind = rule.subkind or getattr(seen.error, "subkind", None)
                where = None if rule.kind is FailureKind.INFRASTRUCTURE else _where(chain)
                return _failure(rule.kind, seen, stage=stage, where=where, subkind=subkind)
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
    wanted = re.compile(pattern, re.MULTILINE)
    return lambda seen: wanted.search(seen.text) is not None


def _disguised(seen: _Seen) -> bool:
    return seen.memory_share > texts.NEARLY_FULL and re.search(texts.DISGUISED_OOM, seen.text) is not None


def _out_of_memory(seen: _Seen) -> bool:
    return isinstance(seen.error, torch.OutOfMemoryError) and not re.search(texts.OUT_OF_RESOURCE, seen.text)


def _is_errno(*numbers: int) -> Callable[[_Seen], bool]:
    return lambda seen: isinstance(seen.error, OSError) and seen.error.errno in numbers


_DISK = _is_errno(errno.ENOSPC, errno.EROFS, errno.EDQUOT)
_FORBIDDEN = _is_errno(errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EIO)


def _other_disk(seen: _Seen) -> bool:
    filename = getattr(seen.error, "filename", None)
    temporary = os.environ.get("TMPDIR", "/tmp")
    return _DISK(seen) and filename is not None and not _lies_in(str(filename), _cache(), temporary)


def _forbidden_cache(seen: _Seen) -> bool:
    """Of other files the same errors say that the user's own data is not as expected."""
    return _FORBIDDEN(seen) and _lies_in(str(getattr(seen.error, "filename", None)), _cache())


def _cache() -> str:
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")


def _lies_in(filename: str, *folders: str) -> bool:
    return any(folder and Path(filename).is_relative_to(folder) for folder in folders)


# The order matters: what the machine did comes before what the config did, memory before the compiler's wrappers.
_RULES = (
    _Rule(FailureKind.NUMERICS_MISMATCH, _classed(NumericsMismatch.__name__)),
    _Rule(FailureKind.INFRASTRUCTURE, _classed(MachineFault.__name__)),
    _Rule(FailureKind.INFRASTRUCTURE, _says(texts.MISSING_TOOL), texts.NO_COMPILER),
    _Rule(FailureKind.INFRASTRUCTURE, _other_disk, "disk"),
    _Rule(FailureKind.INFRASTRUCTURE, _says(texts.BROKEN_DISK), texts.CACHE_FOLDER),
    _Rule(FailureKind.INFRASTRUCTURE, _DISK, texts.CACHE_FOLDER),
    _Rule(FailureKind.INFRASTRUCTURE, _forbidden_cache, texts.CACHE_FOLDER),
    _Rule(FailureKind.INFRASTRUCTURE, _is_errno(errno.EADDRINUSE)),
    _Rule(FailureKind.INFRASTRUCTURE, _says(texts.PORT_IN_USE)),
    _Rule(FailureKind.GPU_FAULT, _says(texts.BROKEN_DEVICE)),
    _Rule(FailureKind.OOM, _out_of_memory),
    _Rule(FailureKind.OOM, _says(texts.PLAIN_OOM)),
    _Rule(FailureKind.HOST_OOM, _says(texts.HOST_OOM)),
    _Rule(FailureKind.HOST_OOM, lambda seen: isinstance(seen.error, MemoryError)),
    _Rule(FailureKind.HOST_OOM, _is_errno(errno.ENOMEM)),
    _Rule(FailureKind.OOM, _disguised, "disguised"),
    _Rule(FailureKind.GPU_FAULT, _says(f"{texts.DISGUISED_OOM}|{texts.FAILED_CALL}")),
    _Rule(FailureKind.INFRASTRUCTURE, _classed("BrokenProcessPool"), texts.COMPILE_WORKERS),
    _Rule(FailureKind.INFRASTRUCTURE, _says(texts.DEAD_WORKERS), texts.COMPILE_WORKERS),
    _Rule(FailureKind.WORKLOAD_ERROR, _classed(WorkloadError.__name__, NotApplicable.__name__)),
    _Rule(
        FailureKind.RECOMPILE_STORM,
        _classed(RecompileStorm.__name__, "FailOnRecompileLimitHit", "RecompileLimitExceeded", "CacheLimitExceeded"),
    ),
    _Rule(FailureKind.RECOMPILE_STORM, _classed("RecompileError")),
    _Rule(FailureKind.RECOMPILE_STORM, _says(texts.RECOMPILE_LIMIT)),
    _Rule(FailureKind.BACKEND_UNSUPPORTED, _says(texts.SDPA), "sdpa"),
    _Rule(FailureKind.BACKEND_UNSUPPORTED, _classed("GPUTooOldForTriton"), texts.GPU_TOO_OLD),
    _Rule(
        FailureKind.COMPILE_ERROR,
        _says(texts.CUDAGRAPH_OVERWRITTEN),
        texts.CUDAGRAPH_LIVENESS,
    ),
    _Rule(FailureKind.COMPILE_ERROR, _says(texts.CUDAGRAPH_CHECKPOINT), "cudagraph_checkpoint"),
    _Rule(FailureKind.COMPILE_ERROR, _classed("CheckpointError"), "checkpoint_mismatch"),
    _Rule(FailureKind.GRAPH_BREAK, _classed("Unsupported", "UserError", "UncapturedHigherOrderOpError")),
    _Rule(FailureKind.GRAPH_BREAK, _says(texts.NO_FRAMES)),
    _Rule(
        FailureKind.COMPILE_ERROR,
        _classed("TorchDynamoException", "OperatorIssue", "CppCompileError", "NoValidChoicesError", "SubprocException"),
    ),
    _Rule(FailureKind.COMPILE_ERROR, _says(texts.COMPILER_BUG)),
)


_OURS = (MachineFault, NotApplicable, NumericsMismatch, RecompileStorm, WorkloadError)  # their text is the message


def _failure(kind: FailureKind, seen: _Seen, *, stage: Stage, where: str | None, subkind: str | None) -> Failure:
    name, first = type(seen.error).__name__, _gist(seen.text)
    plain = isinstance(seen.error, _OURS)
    message = first if plain else f"{name}: {first}" if first else name
    message = message[:_MESSAGE_LENGTH].encode(errors="replace").decode()  # half a surrogate pair cannot be written
    return Failure(kind=kind, stage=stage, message=message, subkind=subkind, where=where)


_TELLING = re.compile(rf"\berror: |{texts.BROKEN_DISK}|{texts.MISSING_TOOL}|{texts.HOST_OOM}")


def _gist(text: str) -> str:
    """The first line, and what a long text tells after it: a tool's complaint, the error that dynamo met, its number
    of a graph break."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    first = lines[0]
    told = next((line for line in lines if _TELLING.search(line)), first)
    if told != first:
        return f"{first}: {told}"
    if met := re.search(r": got (\w+\(.*)", text):
        return f"{first}: {met[1]}"
    if number := re.search(r"/gb/(gb\d+)\.html", text):
        return f"{first} ({number[1]})"
    return first


def _where(chain: list[_Seen]) -> str | None:
    """file:line of the user's code: as the error says, as dynamo traced it, or the deepest such frame."""
    told = (getattr(seen.error, "where", None) for seen in chain)
    if where := next((where for where in told if isinstance(where, str)), None):
        return where
    for seen in chain:
        if match := re.search(r'from user code:\n\s+File "', seen.text):
            traced = re.findall(r'File "([^"]+)", line (\d+)', seen.text[match.start() :])
            users = [frame for frame in traced if _is_users(frame[0])]
            return ":".join((users or traced)[-1])
    for seen in chain:
        for frame in reversed(traceback.extract_tb(seen.error.__traceback__)):
            if _is_users(frame.filename):
                return f"{frame.filename}:{frame.lineno}"
    return None


_NOT_USERS = (str(Path(__file__).parent.parent), sysconfig.get_path("stdlib"), "<")


def _is_users(filename: str) -> bool:
    """Neither ours, nor Python's, nor an installed library's, nor generated by inductor."""
    installed = "site-packages" in filename or "dist-packages" in filename
    return not (filename.startswith(_NOT_USERS) or installed or _lies_in(filename, _cache()))
