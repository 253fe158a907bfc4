"""Why a slice came back without an answer of its own: from exit status, last progress and the end of the log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from autocompile import failure_texts as texts
from autocompile.executors.deadlines import Overdue
from autocompile.records import Failure, FailureKind, Progress, Stage

INTERRUPTED = "interrupted"  # subkinds of a slice that we ended ourselves and that says nothing about its config
BUDGET = "budget"
_DISGUISED = "disguised"
_WORDS = 200

_LIBRARY = re.compile(rf"(site|dist)-packages/|/python3\.\d+/|^{re.escape(str(Path(__file__).parents[1]))}/")
_FRAMES = re.compile(r'^\s*File ".*$|^Extension modules: .*$', re.M)  # their names prove nothing
_NO_MODULE = re.compile(r"ModuleNotFoundError|No module named")
_PLAIN_OOM = rf"OutOfMemoryError(?!: {texts.OUT_OF_RESOURCE})|{texts.PLAIN_OOM}"
_EXPLAINED = re.compile(rf"{_PLAIN_OOM}|{texts.HOST_OOM}|{texts.DISGUISED_OOM}", re.M)
_CUDA_TEXT = re.compile(r"cuda|cublas|cudnn|nccl|\bhip\b|\bXid\b", re.I)
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_TRACEBACK = "Traceback (most recent call last):"
_RAISED_FROM = re.compile(r"^(The above exception was the direct cause|During handling of the above exception)", re.M)
_RANK = re.compile(r"^\[rank\d+\]: ?", re.M)  # before each line of several ranks
_WARNING = re.compile(r"\[[WEF]\w|.*NCCL WARN|terminate called|\s*what\(\)")
_RAISED = r"^(?:[\w.]+\.)?"  # the last line of a traceback begins with the exception's class

# The first hit counts, as in the slice: what the machine lacks, a broken device, exhausted memory, then the config.
_TEXTS = (
    (texts.MISSING_TOOL, FailureKind.INFRASTRUCTURE, texts.NO_COMPILER),
    (texts.BROKEN_DISK, FailureKind.INFRASTRUCTURE, texts.CACHE_FOLDER),
    (texts.PORT_IN_USE, FailureKind.INFRASTRUCTURE, None),
    (texts.BROKEN_DEVICE, FailureKind.GPU_FAULT, None),
    (_PLAIN_OOM, FailureKind.OOM, None),
    (texts.HOST_OOM, FailureKind.HOST_OOM, None),
    (texts.DISGUISED_OOM, FailureKind.OOM, _DISGUISED),  # on a full device; else as the next
    (rf"{texts.DISGUISED_OOM}|{texts.FAILED_CALL}", FailureKind.GPU_FAULT, None),
    (texts.DEAD_WORKERS, FailureKind.INFRASTRUCTURE, texts.COMPILE_WORKERS),
    (rf"{_RAISED}FailOnRecompileLimitHit|{texts.RECOMPILE_LIMIT}", FailureKind.RECOMPILE_STORM, None),
    (texts.SDPA, FailureKind.BACKEND_UNSUPPORTED, "sdpa"),
    (texts.OLD_GPU, FailureKind.BACKEND_UNSUPPORTED, texts.GPU_TOO_OLD),
    (texts.CUDAGRAPH_OVERWRITTEN, FailureKind.COMPILE_ERROR, texts.CUDAGRAPH_LIVENESS),
    (texts.CUDAGRAPH_CHECKPOINT, FailureKind.COMPILE_ERROR, "cudagraph_checkpoint"),
    (rf"{_RAISED}CheckpointError\b", FailureKind.COMPILE_ERROR, "checkpoint_mismatch"),
    (
        rf"{_RAISED}(Unsupported|UserError|UncapturedHigherOrderOpError)\b|{texts.NO_FRAMES}",
        FailureKind.GRAPH_BREAK,
        None,
    ),
    (
        rf"{_RAISED}(InductorError|BackendCompilerFailed|\w*CompileError|InternalTorchDynamoError|TorchRuntimeError)\b"
        rf"|{texts.COMPILER_BUG}",
        FailureKind.COMPILE_ERROR,
        None,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a slice ended. ``cause`` is None where it exited by itself with ``status`` (negative: the signal's number);
    else ``bound`` is the number of seconds that ran out, ``cut_short`` where only the budget made it so few."""

    status: int | None = None
    cause: Overdue | None = None
    interrupted: bool = False
    bound: float | None = None
    cut_short: bool = False


def failure_of(
    ending: Ending, progress: Progress | None, *, log_tail: str, first_stage: Stage, device_memory_bytes: int | None
) -> Failure:
    """The failure of a slice that left no answer.

    ``first_stage`` is where it was if it never told, ``device_memory_bytes`` all that the device has, if known.
    """
    stage = first_stage if progress is None else progress.stage
    if ending.interrupted:
        return Failure(
            kind=FailureKind.INFRASTRUCTURE, subkind=INTERRUPTED, stage=stage, message="the study was interrupted"
        )
    if ending.cause is not None:
        return _of_deadline(ending, stage)
    log_tail = _RANK.sub("", log_tail)
    status, said = ending.status or 0, _telling_part(_FRAMES.sub("", log_tail))
    found = _of_start(status, said) if progress is None else None
    found = found or _of_signal(status, said)
    found = found or _of_text(status, said, full=_is_nearly_full(progress, device_memory_bytes))
    kind, subkind, reason, words = found
    message = f"{reason}: {words}" if words else reason
    return Failure(kind=kind, subkind=subkind, stage=stage, message=message, where=_where(log_tail))


_Found: TypeAlias = tuple[
    FailureKind, str | None, str, str
]  # kind, subkind, reason, and the line of the log that tells


def _of_deadline(ending: Ending, stage: Stage) -> Failure:
    bound = f"{ending.bound or 0.0:.0f} s"
    match ending.cause:
        case Overdue.COMPILE:
            message = f"no first step within {bound} of compile and warm-up"
            subkind = BUDGET if ending.cut_short else None
            return Failure(kind=FailureKind.COMPILE_TIMEOUT, subkind=subkind, stage=stage, message=message)
        case Overdue.STEP:
            return Failure(kind=FailureKind.HANG, stage=stage, message=f"no step for {bound}")
    message = f"the {bound} that the budget left for it ran out"
    return Failure(kind=FailureKind.INFRASTRUCTURE, subkind=BUDGET, stage=stage, message=message)


def _of_start(status: int, said: str) -> _Found | None:
    if status in (126, 127) or _NO_MODULE.search(said):
        reason = f"the slice could not start (exit status {status} and no answer)"
        return FailureKind.INFRASTRUCTURE, None, reason, _last_words(said)
    return None


def _of_signal(status: int, said: str) -> _Found | None:
    """Deaths by a signal that the log cannot explain better; 128 + n is how a shell reports signal n."""
    number = -status if status < 0 else status - 128
    if number == signal.SIGKILL:
        reason = "killed from outside, as the kernel does when the host's memory is full"
        return FailureKind.HOST_OOM, None, reason, _last_words(said)
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return FailureKind.INFRASTRUCTURE, None, f"ended from outside with {signal.Signals(number).name}", ""
    if number in _CRASHES and not _EXPLAINED.search(said):
        kind = FailureKind.GPU_FAULT if _CUDA_TEXT.search(said) else FailureKind.UNKNOWN
        return kind, None, f"crashed with {signal.Signals(number).name}", _last_words(said)
    return None


def _of_text(status: int, said: str, *, full: bool) -> _Found:
    ended = f"exit status {status} and no answer"
    for pattern, kind, subkind in _TEXTS:
        if (full or subkind != _DISGUISED) and (match := re.search(pattern, said, re.M)):
            line = said[said.rfind("\n", 0, match.start()) + 1 :].split("\n", 1)[0]
            return kind, subkind, ended, line.strip()[:_WORDS]
    return FailureKind.UNKNOWN, None, ended, _last_words(said)


def _is_nearly_full(progress: Progress | None, device_memory_bytes: int | None) -> bool:
    if progress is None or not device_memory_bytes:
        return False
    used = progress.device_memory_bytes or 0
    if used >= device_memory_bytes:  # no driver reports every byte as used: a child that told the total instead
        used = 0
    return max(used, progress.reserved_memory_bytes or 0) / device_memory_bytes > texts.NEARLY_FULL


def _telling_part(said: str) -> str:
    """From the last traceback on, with those it was raised from, and of what comes before the warnings of C++: a
    program's notes and errors that it handled prove nothing."""
    traceback = said.rfind(_TRACEBACK)
    if traceback < 0:
        return said
    while (earlier := said.rfind(_TRACEBACK, 0, traceback)) >= 0 and _RAISED_FROM.search(said[earlier:traceback]):
        traceback = earlier
    warned = [line for line in said[:traceback].splitlines() if _WARNING.match(line)]
    return "\n".join([*warned, said[traceback:]])


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    return (fatal or lines)[-1][:_WORDS] if lines else ""


def _where(log_tail: str) -> str | None:
    """file:line of the last frame in the log that is neither ours nor a library's."""
    frames = re.findall(r'File "([^"<]+)", line (\d+)', log_tail)
    users = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    return ":".join(users[-1]) if users else None
