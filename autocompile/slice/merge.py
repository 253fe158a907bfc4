"""From what each rank wrote to the slice's one outcome."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from autocompile.records import Failed, Measured, Outcome
from autocompile.values import Value

_CONSEQUENCE = re.compile(r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket", re.IGNORECASE)


class RankOutcome(Value):
    """The document ``rank<k>.json``; ``time`` is seconds since the epoch at which the rank ended."""

    rank: int
    time: float
    outcome: Annotated[Measured | Failed, Field(discriminator="type")]


def merge(ranks: Sequence[RankOutcome]) -> Outcome:
    """The earliest failure that is a cause and no consequence; without failures the slowest rank speaks for all.

    When one rank dies the others report its closed connection or a timeout: that is a consequence.
    """
    failures = [rank for rank in sorted(ranks, key=lambda rank: rank.time) if isinstance(rank.outcome, Failed)]
    causes = [rank for rank in failures if not _CONSEQUENCE.search(_message(rank))]
    if failures:
        return (causes or failures)[0].outcome
    return max(ranks, key=_step_seconds).outcome


def _message(rank: RankOutcome) -> str:
    assert isinstance(rank.outcome, Failed)
    return rank.outcome.failure.message


def _step_seconds(rank: RankOutcome) -> float:
    assert isinstance(rank.outcome, Measured)
    return rank.outcome.measurement.step_seconds.median
