"""Why a slice came back without an answer of its own: from exit status, last progress and the end of the log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from autocompile import failure_texts
from autocompile.executors.deadlines import Overdue
from autocompile.records import Failure, FailureKind, Progress, Stage

INTERRUPTED = "interrupted"  # subkinds of a slice that we ended ourselves and that says nothing about its config
BUDGET = "budget"

_HOST_OOM = re.compile(r"DefaultCPUAllocator: can't allocate memory|^MemoryError|killed by signal: Killed", re.M)
_MACHINE = re.compile(r"Address already in use|No space left on device|Read-only file system", re.I)
_NO_MODULE = re.compile(r"ModuleNotFoundError|No module named")
_BROKEN_DEVICE = re.compile(failure_texts.BROKEN_DEVICE)
_PLAIN_OOM = re.compile(rf"OutOfMemoryError|{failure_texts.PLAIN_OOM}")
_DISGUISED_OOM = re.compile(failure_texts.DISGUISED_OOM)
_FAILED_CALL = re.compile(failure_texts.FAILED_CALL)
_CUDA_TEXT = re.compile(r"cuda|cublas|cudnn|nccl|\bhip\b|\bXid\b", re.I)
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a slice ended. ``cause`` is None where it exited by itself with ``status`` (negative: the signal's number);
    else ``bound`` is the number of seconds that ran out."""

    status: int | None = None
    cause: Overdue | None = None
    interrupted: bool = False
    bound: float | None = None


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
        return _of_deadline(ending.cause, ending.bound or 0.0, stage)
    status = ending.status or 0
    kind, reason = _of_signal(status, log_tail) or _of_text(
        status, log_tail, told=progress is not None, full=_is_nearly_full(progress, device_memory_bytes)
    )
    return Failure(kind=kind, stage=stage, message=f"{reason}{_last_words(log_tail)}")


def _of_deadline(cause: Overdue, bound: float, stage: Stage) -> Failure:
    match cause:
        case Overdue.COMPILE:
            message = f"no first step within {bound:.0f} s of compile and warm-up"
            return Failure(kind=FailureKind.COMPILE_TIMEOUT, stage=stage, message=message)
        case Overdue.STEP:
            return Failure(kind=FailureKind.HANG, stage=stage, message=f"no step for {bound:.0f} s")
        case Overdue.SLICE:
            message = f"the {bound:.0f} s that the budget left for it ran out"
            return Failure(kind=FailureKind.INFRASTRUCTURE, subkind=BUDGET, stage=stage, message=message)


def _of_signal(status: int, log_tail: str) -> tuple[FailureKind, str] | None:
    """Deaths by a signal that the log cannot explain better; 128 + n is how a shell reports signal n."""
    number = -status if status < 0 else status - 128
    if number == signal.SIGKILL:
        return FailureKind.HOST_OOM, "killed from outside, as the kernel does when the host's memory is full"
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return FailureKind.INFRASTRUCTURE, f"ended from outside with {signal.Signals(number).name}"
    if number in _CRASHES and not _PLAIN_OOM.search(log_tail) and not _DISGUISED_OOM.search(log_tail):
        kind = FailureKind.GPU_FAULT if _CUDA_TEXT.search(log_tail) else FailureKind.UNKNOWN
        return kind, f"crashed with {signal.Signals(number).name}"
    return None


def _of_text(status: int, log_tail: str, *, told: bool, full: bool) -> tuple[FailureKind, str]:
    """The first hit counts: what the machine lacks, a broken device, an exhausted device, an exhausted host."""
    ended = f"exit status {status} and no answer"
    if not told and (status in (126, 127) or _NO_MODULE.search(log_tail)):
        return FailureKind.INFRASTRUCTURE, f"the slice could not start ({ended})"
    if _MACHINE.search(log_tail):
        return FailureKind.INFRASTRUCTURE, ended
    if _BROKEN_DEVICE.search(log_tail):
        return FailureKind.GPU_FAULT, ended
    if _PLAIN_OOM.search(log_tail):
        return FailureKind.OOM, ended
    if _DISGUISED_OOM.search(log_tail):
        return (FailureKind.OOM if full else FailureKind.GPU_FAULT), ended
    if _FAILED_CALL.search(log_tail):
        return FailureKind.GPU_FAULT, ended
    if _HOST_OOM.search(log_tail):
        return FailureKind.HOST_OOM, ended
    return FailureKind.UNKNOWN, ended


def _is_nearly_full(progress: Progress | None, device_memory_bytes: int | None) -> bool:
    if progress is None or not device_memory_bytes:
        return False
    used = progress.device_memory_bytes or 0
    if used >= device_memory_bytes:  # no driver reports every byte as used: a child that told the total instead
        used = 0
    return max(used, progress.reserved_memory_bytes or 0) / device_memory_bytes > failure_texts.NEARLY_FULL


def _last_words(log_tail: str) -> str:
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""
