"""Clocks that time cycles: the host's on a CPU, one event a cycle on a GPU, where the host runs ahead of the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, Protocol

import torch

TOLERANCE = 0.02  # of the wall clock, or one cycle if that is more


class Clock(Protocol):
    """Told of the start of the first cycle and of the end of each; ``seconds`` are those of all finished cycles."""

    seconds: list[float]

    def tick(self) -> None: ...
    def read(self) -> None:
        """Bring ``seconds`` up to date; asks the device, does not wait for it."""


def clock_of(device: torch.device) -> Clock:
    return _EventClock(device) if device.type == "cuda" else _WallClock()


def reconciled(seconds: Sequence[float], wall_seconds: float) -> tuple[list[float], bool]:
    """The cycles' seconds and whether the wall clock agrees with their sum; if not, the larger of the two counts.

    Work that the events miss, on another stream say, makes the wall clock's time the larger one.
    """
    total = sum(seconds)
    if abs(wall_seconds - total) <= max(TOLERANCE * wall_seconds, median(seconds)):
        return list(seconds), True
    return [one * max(1.0, wall_seconds / total) for one in seconds], False


class _WallClock:
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now

    def read(self) -> None:
        pass


class _EventClock:
    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._stream = torch.cuda.current_stream(device)
        self._events: deque[Any] = deque()  # the last that was read, and those that the GPU has not come to

    def tick(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)

    def read(self) -> None:
        while len(self._events) > 1 and self._events[1].query():
            start = self._events.popleft()
            self.seconds.append(start.elapsed_time(self._events[0]) / 1e3)
