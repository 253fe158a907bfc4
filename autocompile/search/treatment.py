"""What failures call for: the config again and how, the end of the search, or the end of the study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autocompile.failure_texts import CACHE_FOLDER, COMPILE_WORKERS, SPARE_CACHE_FOLDER
from autocompile.records import Failure, FailureKind, State, TrialRecord
from autocompile.search.canonical import Key, is_eager, key, known_to_fail, micro_batch
from autocompile.spec import Role

_IN_A_ROW = 3
_LOSSES = 10
_BRAKES = ((10, 8, 0), (20, 20, 2))  # of so many latest configs, known of at least so many, at most so many succeed
_AGAIN = (FailureKind.HOST_OOM, FailureKind.HANG, FailureKind.COMPILE_ERROR)  # blamed on the config, but not at once


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """How a config's next slice differs from its first. ``fresh_caches`` counts the cache folders it leaves aside."""

    compile_threads: int | None = None
    fresh_caches: int = 0


def treatment(attempts: Sequence[TrialRecord]) -> Treatment:
    """What may help against the config's failures so far; it stays in force after it has helped."""
    failures = [record.failure for record in attempts if record.failure is not None and not record.stopped]
    return Treatment(
        compile_threads=1 if any(_workers_to_blame(failure) for failure in failures) else None,
        fresh_caches=sum(failure.kind is FailureKind.COMPILE_ERROR for failure in failures),
    )


def deserves_repeat(attempts: Sequence[TrialRecord]) -> bool:
    """Once after a failure that may not be the config's; as often as it takes where the user or the budget ended it,
    and nearly so where its coordinator was killed: a config may take the whole machine with it."""
    if not attempts or not _inconclusive(attempts[-1]):
        return False
    successes = [index for index, record in enumerate(attempts) if record.state is State.COMPLETE]
    since = attempts[successes[-1] + 1 if successes else 0 :]
    n_lost = sum(_is_lost(record) for record in since)
    n_failed = sum(_inconclusive(record) and not _cut_short(record) for record in since) - n_lost
    return n_failed <= 1 and n_lost <= _LOSSES


def is_over(attempts: Sequence[TrialRecord]) -> bool:
    """Whether something is known, or nothing more is to be tried."""
    return bool(attempts) and attempts[-1].state is not State.RUNNING and not deserves_repeat(attempts)


def state_after(failure: Failure, attempts: Sequence[TrialRecord]) -> State:
    """FAIL blames the machine. A GPU that faults again in a new process does so for the config's sake."""
    faulted = any(record.failure and record.failure.kind is FailureKind.GPU_FAULT for record in attempts)
    if failure.kind is FailureKind.GPU_FAULT and faulted:
        return State.PRUNED
    return State.FAIL if failure.kind.blames_machine else State.PRUNED


def needs_spare_cache(records: Sequence[TrialRecord]) -> bool:
    """Whether the folder for compiled code was found broken, so that another one is to be used."""
    return any(_subkind(record) in (CACHE_FOLDER, SPARE_CACHE_FOLDER) for record in records)


def abort_reason(records: Sequence[TrialRecord]) -> str | None:
    """Why going on makes no sense, with the message of the last failure; None while the machine seems to work."""
    ended = sorted((record for record in records if record.state is not State.RUNNING), key=lambda one: one.number)
    if not ended or (last := ended[-1].failure) is None or ended[-1].stopped:
        return None
    if last.subkind == SPARE_CACHE_FOLDER:
        return f"compiled code can be kept nowhere: {last.message}"
    if len(_row(ended, _is_machine_fault)) >= _IN_A_ROW:
        return f"{_IN_A_ROW} slices in a row failed on this machine, the last with {last.kind}: {last.message}"
    if len(_row(ended, lambda record: _kind(record) is FailureKind.UNKNOWN)) >= _IN_A_ROW:
        return f"{_IN_A_ROW} slices in a row failed and nobody knows why, the last in {last.stage}: {last.message}"
    killed = _row(ended, lambda record: _kind(record) is FailureKind.HOST_OOM)
    if len(killed) >= _IN_A_ROW and _starved(killed, ended):
        return f"{_IN_A_ROW} configs in a row ran out of the host's memory: {last.message}; give the host more"
    return None


def of_broken_machine(records: Sequence[TrialRecord]) -> set[int]:
    """The numbers of the slices in rows of machine faults that ended the study: when it goes on, on a machine that was
    mended, their configs are to be tried as if for the first time."""
    row: list[int] = []
    found: set[int] = set()
    for record in sorted(records, key=lambda one: one.number):
        if record.state is State.RUNNING or record.stopped:
            continue
        row = [*row, record.number] if record.state is State.FAIL and _is_machine_fault(record) else []
        if len(row) >= _IN_A_ROW:
            found.update(row)
    return found


def brake_reason(records: Sequence[TrialRecord]) -> str | None:
    """Why a search in which almost everything fails should end, with the commonest failure; None while it may go on.

    A config counts once, with its last slice; what the budget or the user ended says nothing.
    """
    last: dict[Key, TrialRecord] = {}
    for record in sorted(records, key=lambda one: one.number, reverse=True):
        if record.role in (Role.BASELINE, Role.SEARCH) and record.state is not State.RUNNING and not record.stopped:
            last.setdefault(key(record.config), record)
            if len(last) == _BRAKES[-1][0]:
                break
    latest = [record.failure for record in last.values()]
    for size, least, may_succeed in _BRAKES:
        failures = [failure for failure in latest[:size] if failure is not None]
        count = len(latest[:size])
        if count >= least and count - len(failures) <= may_succeed:
            kind, alike = Counter(failure.kind for failure in failures).most_common(1)[0]
            message = next(failure.message for failure in failures if failure.kind is kind)
            which = f"{len(failures)} of the last {count} configs" if may_succeed else f"the last {count} configs all"
            return f"{which} failed, {alike} of them with {kind}: {message}"
    return None


def _inconclusive(record: TrialRecord) -> bool:
    if record.state is State.COMPLETE:
        return False
    if record.state is State.FAIL or _cut_short(record):
        return True
    failure = record.failure
    if record.state is not State.PRUNED or failure is None or failure.kind not in _AGAIN:
        return False
    # A compile error that has a name of its own is known to come again, and so is one of a pair known to fail.
    return failure.kind is not FailureKind.COMPILE_ERROR or not (failure.subkind or known_to_fail(record.config))


def _cut_short(record: TrialRecord) -> bool:
    return record.stopped is not None and record.stopped.reason in ("budget", "interrupted")


def _is_lost(record: TrialRecord) -> bool:
    return record.stopped is not None and record.stopped.reason == "lost"


def _workers_to_blame(failure: Failure) -> bool:
    """Many compile workers fill the host's memory, and a forked one may wait for ever (pytorch#121197)."""
    return failure.kind in (FailureKind.HOST_OOM, FailureKind.HANG) or failure.subkind == COMPILE_WORKERS


def _kind(record: TrialRecord) -> FailureKind | None:
    return record.failure.kind if record.failure is not None and not record.stopped else None


def _subkind(record: TrialRecord) -> str | None:
    return record.failure.subkind if record.failure is not None else None


def _row(ended: Sequence[TrialRecord], fits: Callable[[TrialRecord], bool]) -> list[TrialRecord]:
    """The last records without another between them, those that blame their config once for each config."""
    row: dict[object, TrialRecord] = {}
    for record in reversed(ended):
        if not fits(record):
            break
        slice_alone = _kind(record) is FailureKind.INFRASTRUCTURE
        row[record.number if slice_alone else key(record.config)] = record
    return list(row.values())


def _is_machine_fault(record: TrialRecord) -> bool:
    kind = _kind(record)
    return kind is not None and kind.blames_machine


def _starved(killed: Sequence[TrialRecord], ended: Sequence[TrialRecord]) -> bool:
    """The host itself has too little memory: nothing was ever measured, or what used to fit is killed now.

    Compile workers take memory too, so that compiled configs are killed where eager ones run is their own fault.
    """
    fitted = [micro_batch(record.config) for record in ended if record.measurement and is_eager(record.config)]
    eager = [micro_batch(record.config) for record in killed if is_eager(record.config)]
    return not any(record.measurement for record in ended) or any(size <= max(fitted, default=0) for size in eager)
