"""What the coordinator tells and is told: events for the live view, the clock, the result, the interruption."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias, TypeVar

from autocompile.best_file import BestConfig
from autocompile.errors import AutocompileError
from autocompile.knob_table import KnobValue
from autocompile.records import TrialRecord
from autocompile.report import Study
from autocompile.spec import Role
from autocompile.values import Value

T = TypeVar("T")


class TrialStarted(Value):
    """``folder`` is the slice's: its progress.json tells the stage."""

    slot: int
    number: int
    role: Role
    config: dict[str, KnobValue]
    folder: Path


class TrialEnded(Value):
    record: TrialRecord


class Tick(Value):
    """Time passes: a few times a second while slices run."""

    seconds_used: float


Event: TypeAlias = TrialStarted | TrialEnded | Tick


@dataclass(frozen=True, kw_only=True)
class StudyResult(Study):
    """The study as it ended. ``best`` is what best.yaml holds; None where nothing was measured."""

    best: BestConfig | None


class Interrupted(AutocompileError):
    """The study was ended from outside and all of it is kept; the same command goes on with it."""

    def __init__(self, name: str | None, number: int) -> None:
        saved = f"study {name} is saved, the same command goes on with it" if name else "nothing was measured yet"
        super().__init__(f"interrupted; {saved}")
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number


class Clock(Protocol):
    """The coordinator's only source of time."""

    def now(self) -> float:
        """Seconds that only ever grow."""
        ...

    def get(self, queue: SimpleQueue[T], seconds: float) -> T | None:
        """The next item, or None if none comes within this time."""
        ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.monotonic()

    def get(self, queue: SimpleQueue[T], seconds: float) -> T | None:
        try:
            return queue.get(timeout=max(seconds, 0.0))
        except Empty:
            return None
