"""Time optimizer steps: warm up until the process is quiet, then one window of whole cycles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from autocompile.records import StepSeconds
from autocompile.spec import SlicePlan

WARMUP_STEPS = 3  # at least, whole optimizer steps
QUIET_STEPS = 2  # without compile, CUDA-graph recording or allocator growth, before a window may begin
MOST_WARMUP_STEPS = 60
MOST_CYCLES = 1000


class RecompileStorm(Exception):
    """The config does not stop compiling; the message says what was seen."""


class Watch(Protocol):
    """What must stand still before and during a window."""

    def n_compiles(self) -> int: ...
    def limit_hits(self) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """One optimizer step, and what to do around it. ``step`` returns the loss as a tensor and does not synchronise."""

    step: Callable[[], torch.Tensor]
    watch: Watch
    device: torch.device
    stepped: Callable[[], None]  # told after each step, for deadlines and the live view

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0


def warm_up(stepper: Stepper) -> list[float]:
    """Step until nothing compiles, records or grows any more; returns the losses.

    Raises RecompileStorm if a recompile limit was hit or compiling does not end.
    """
    losses: list[float] = []
    quiet = 0
    while quiet < QUIET_STEPS or len(losses) < WARMUP_STEPS:
        compiles, reserved = stepper.watch.n_compiles(), stepper.reserved_bytes()
        losses.append(float(stepper.step()))  # reading the loss waits for the step
        stepper.stepped()
        compiled = stepper.watch.n_compiles() != compiles
        quiet = 0 if compiled or stepper.reserved_bytes() != reserved else quiet + 1
        if len(losses) == MOST_WARMUP_STEPS and not compiled:
            break  # an allocator that grows for ever is no reason not to measure
        if len(losses) == MOST_WARMUP_STEPS:
            raise RecompileStorm(f"still compiling after {MOST_WARMUP_STEPS} steps")
        if hits := stepper.watch.limit_hits():
            raise RecompileStorm(f"recompile limit hit: {hits[0]} runs eager since")
    return losses


def steady_window(stepper: Stepper, plan: SlicePlan) -> tuple[StepSeconds, list[float]]:
    """A window without a compile inside: a first one that has one is void, a second one is a storm.

    Returns the interval of a cycle's seconds and the losses of all windows.
    """
    losses: list[float] = []
    for attempt in range(2):
        if attempt:
            losses += warm_up(stepper)
        before = stepper.watch.n_compiles()
        seconds, seen = _window(stepper, plan)
        losses += seen
        if hits := stepper.watch.limit_hits():
            raise RecompileStorm(f"recompile limit hit: {hits[0]} runs eager since")
        if stepper.watch.n_compiles() == before:
            return median_interval(seconds), losses
    raise RecompileStorm("compiled again inside two windows in a row")


def median_interval(seconds: Sequence[float]) -> StepSeconds:
    """The median and its distribution-free 95 % interval from order statistics.

    The ranks are those of the sign test: n/2 -+ 0.98 sqrt(n) in the normal approximation (Conover, Practical
    Nonparametric Statistics, section 3.2), clipped to the sample.
    """
    ordered, n = sorted(seconds), len(seconds)
    reach = 0.98 * math.sqrt(n)
    low = ordered[max(0, math.floor(n / 2 - reach))]
    high = ordered[min(n - 1, math.ceil(n / 2 + reach) - 1)]
    return StepSeconds(median=median(ordered), low=low, high=high, n=n)


def _window(stepper: Stepper, plan: SlicePlan) -> tuple[list[float], list[float]]:
    """Seconds of each cycle and the losses. On a GPU one event a cycle, read as they complete, no synchronisation."""
    stepper.synchronise()
    clock = _EventClock(stepper.device) if stepper.device.type == "cuda" else _WallClock()
    losses: list[torch.Tensor] = []
    began = time.perf_counter()
    clock.tick()
    while len(losses) < MOST_CYCLES:
        losses.append(stepper.step())
        clock.tick()
        stepper.stepped()
        done = clock.seconds()
        spent = time.perf_counter() - began
        if len(done) >= plan.min_cycles and (spent > plan.window_seconds or _narrow(done, plan.interval)):
            break
    stepper.synchronise()
    return clock.seconds(), [float(loss) for loss in losses]


def _narrow(seconds: Sequence[float], interval: float) -> bool:
    """Fewer than 8 samples have no 95 % interval inside their range worth the name."""
    if len(seconds) < 8:
        return False
    found = median_interval(seconds)
    return found.high - found.low <= 2 * interval * found.median


class _WallClock:
    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self._ticks, self._ticks[1:], strict=False)]


class _EventClock:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events: list[Any] = []
        self._seconds: list[float] = []

    def tick(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Cycles that the GPU has finished so far; asks, does not wait."""
        while len(self._seconds) + 1 < len(self._events) and self._events[len(self._seconds) + 1].query():
            start, end = self._events[len(self._seconds) : len(self._seconds) + 2]
            self._seconds.append(start.elapsed_time(end) / 1e3)
        return self._seconds
