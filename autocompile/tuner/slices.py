"""What the answer of a slice, or its silence, makes of its trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from autocompile.executors.exits import BUDGET, INTERRUPTED
from autocompile.records import (
    ANSWER,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Outcome,
    Stage,
    State,
    Stopped,
    TrialRecord,
)
from autocompile.search import state_after, tight_memory
from autocompile.search.canonical import key
from autocompile.spec import FULL_DEPTH, Facts, StudySpec

COMPILE_SECONDS = 900.0
SLICE_SECONDS = COMPILE_SECONDS + 600.0  # generous time to build, warm up, measure and check
SENSIBLE_SECONDS = 20.0


def slice_seconds(left: float | None, before_confirmations: float | None) -> float:
    """The deadline of a slice: what the budget leaves it, if that is less than the most any slice may take.

    ``left`` is None without a budget, ``before_confirmations`` is None for a confirmation. The time that is kept for
    those is not to be had, unless without it there is too little to measure anything.
    """
    if left is None:
        return SLICE_SECONDS
    kept_back = before_confirmations is not None and SENSIBLE_SECONDS <= before_confirmations < COMPILE_SECONDS
    mine = before_confirmations if kept_back and before_confirmations is not None else left
    return min(SLICE_SECONDS, max(min(mine, left), 1.0))


def told(
    running: TrialRecord,
    outcome: Outcome,
    records: Sequence[TrialRecord] = (),
    *,
    seconds: float | None,
    deadline_seconds: float,
) -> TrialRecord:
    """The trial with its outcome. A slice that we ended says nothing about its config, so it has none.

    ``records`` are the study's: a config that fails once more may be judged otherwise.
    """
    update: dict[str, object] = {"seconds": seconds}
    match outcome:
        case Measured(measurement=measurement):
            update |= {"state": State.COMPLETE, "outcome": outcome}
            if running.fidelity == FULL_DEPTH:
                update |= {"value": measurement.tokens_per_second, "value_source": "measured"}
        case Failed(failure=failure) if failure.subkind == BUDGET and failure.kind is FailureKind.COMPILE_TIMEOUT:
            cut = Stopped(reason="budget", bound=seconds)  # with more of it the same config may be tried again
            update |= {"state": State.PRUNED, "outcome": outcome, "stopped": cut}
        case Failed(failure=failure) if failure.subkind == INTERRUPTED:
            return stopped(running, Stopped(reason="interrupted"), seconds=seconds)
        case Failed(failure=failure) if failure.subkind == BUDGET and deadline_seconds < SLICE_SECONDS:
            return stopped(running, Stopped(reason="budget", bound=deadline_seconds), seconds=seconds)
        case Failed(failure=failure) if failure.subkind == BUDGET:  # there was budget left: it hung where no step is
            message = f"no answer within {deadline_seconds:.0f} s"
            hang = Failure(kind=FailureKind.HANG, stage=failure.stage, message=message)
            update |= {"state": State.PRUNED, "outcome": Failed(failure=hang)}
        case Failed(failure=failure):
            attempts = [record for record in records if key(record.config) == key(running.config)]
            update |= {"state": state_after(failure, attempts), "outcome": outcome}
    return running.model_copy(update=update)


def with_headroom(record: TrialRecord, spec: StudySpec, facts: Facts) -> TrialRecord:
    """Flagged where it left less of the device's memory free than the study asks for, which a slice cannot know."""
    found = record.outcome
    if not isinstance(found, Measured) or not tight_memory(spec, facts, found.measurement):
        return record
    degraded = tuple(dict.fromkeys((*found.measurement.degraded, "tight_memory")))
    measurement = found.measurement.model_copy(update={"degraded": degraded})
    return record.model_copy(update={"outcome": found.model_copy(update={"measurement": measurement})})


def with_mfu(record: TrialRecord, facts: Facts) -> TrialRecord:
    """With its arithmetic as a share of what the device was found to reach, which a slice does not know either."""
    found, ceiling = record.outcome, facts.matmul_flops_per_second
    if not isinstance(found, Measured) or found.measurement.model_flops_per_second is None or not ceiling:
        return record
    mfu = found.measurement.model_flops_per_second / ceiling
    if mfu > 1:  # something else took the device while the ceiling was measured
        return record
    measurement = found.measurement.model_copy(update={"mfu": mfu})
    return record.model_copy(update={"outcome": found.model_copy(update={"measurement": measurement})})


def stopped(running: TrialRecord, why: Stopped, *, seconds: float | None) -> TrialRecord:
    return running.model_copy(update={"state": State.FAIL, "stopped": why, "seconds": seconds})


def left_behind(running: TrialRecord, folder: Path, records: Sequence[TrialRecord]) -> TrialRecord:
    """A trial whose coordinator died: told if its answer lies there complete, else lost."""
    try:
        answer = ANSWER.validate_json((folder / "outcome.json").read_bytes())
    except (OSError, ValidationError):
        return stopped(running, Stopped(reason="lost"), seconds=None)
    if not isinstance(answer, Measured | Failed):
        return stopped(running, Stopped(reason="lost"), seconds=None)
    return told(running, answer, records, seconds=None, deadline_seconds=0.0)


def machine_failure(message: str, *, subkind: str | None = None) -> Failed:
    """Of a slice that never came to run."""
    kind = FailureKind.INFRASTRUCTURE
    return Failed(failure=Failure(kind=kind, subkind=subkind, stage=Stage.BUILD, message=message))
