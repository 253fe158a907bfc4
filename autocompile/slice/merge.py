"""From what each rank wrote to the slice's one outcome."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Annotated, TypeVar

from pydantic import Field

from autocompile.records import Failed, Measured, Outcome
from autocompile.values import Value

_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket|remote process exited|network error"
    r"|ncclRemoteError|process group .* aborted|communicator was aborted",
    re.IGNORECASE,
)


N = TypeVar("N", int, float)


class RankOutcome(Value):
    """The document ``rank<k>.json``; ``time`` is seconds since the epoch at which the rank ended."""

    rank: int
    time: float
    outcome: Annotated[Measured | Failed, Field(discriminator="type")]


def merge(ranks: Sequence[RankOutcome]) -> Outcome:
    """The earliest failure that is a cause and no consequence, else all measurements in one."""
    failures = [rank for rank in sorted(ranks, key=lambda rank: rank.time) if isinstance(rank.outcome, Failed)]
    if failures:
        return next(filter(is_cause, failures), failures[0]).outcome
    return _together([rank.outcome for rank in ranks if isinstance(rank.outcome, Measured)])


def is_cause(rank: RankOutcome) -> bool:
    """When one rank dies the others report its closed connection or a timeout: that is a consequence."""
    return isinstance(rank.outcome, Failed) and not _CONSEQUENCE.search(rank.outcome.failure.message)


def _together(ranks: Sequence[Measured]) -> Measured:
    """The slowest rank's times with the tokens of all, the mean of their losses, the most of each memory, and the
    telemetry of the rank that has most to tell."""
    slowest = max(ranks, key=lambda rank: rank.measurement.step_seconds.median)
    if len(ranks) == 1:
        return slowest
    each = [rank.measurement for rank in ranks]
    peaks = tuple(one.peak_memory_bytes for one in each if one.peak_memory_bytes is not None)
    losses = zip(*(one.losses for one in each), strict=False)
    found = slowest.measurement.model_copy(
        update={
            "tokens_per_second": sum(one.tokens_per_second for one in each),
            "compile": max((one.compile for one in each), key=lambda cost: cost.cold_seconds),
            "setup_seconds": _most(one.setup_seconds for one in each),
            "peak_memory_bytes": max(peaks, default=None),
            "peak_memory_bytes_by_rank": peaks,
            "reserved_memory_bytes": _most(one.reserved_memory_bytes for one in each),
            "device_memory_bytes": _most(one.device_memory_bytes for one in each),
            "losses": tuple(fmean(of_step) for of_step in losses),
            "data_wait_seconds": _most(one.data_wait_seconds for one in each),
            "degraded": tuple(dict.fromkeys(flag for one in each for flag in one.degraded)),
        }
    )
    flagged = max(ranks, key=lambda rank: len(rank.measurement.degraded))
    return Measured(measurement=found, telemetry=flagged.telemetry)


def _most(values: Iterable[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)
