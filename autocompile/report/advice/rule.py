"""One row of the tables of advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autocompile.report.advice import changes
from autocompile.report.advice.changes import Settings
from autocompile.report.advice.seen import Case, Seen


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``each``: what was seen in two places are two causes, each worth a line of its own."""

    cause: str
    seen: Seen
    change: str
    sets: Callable[[Case], Settings] = changes.nothing
    each: bool = False
