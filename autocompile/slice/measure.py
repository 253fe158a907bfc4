"""Time optimizer steps: warm up until the process is quiet and the GPU hot, then one window of whole cycles."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Protocol

import torch

from autocompile.records import Degradation, GpuState, StepSeconds
from autocompile.slice.clocks import Clock, clock_of, reconciled
from autocompile.slice.gpu_state import GpuWatch, Nvml
from autocompile.slice.group import ALONE, Group
from autocompile.slice_plan import SlicePlan

WARMUP_STEPS = 3  # at least, whole optimizer steps
QUIET_STEPS = 2  # without compile, CUDA-graph recording or allocator growth, before a window may begin
_FIRST_EVALUATION = 3  # step of a window at the latest: a window may be shorter than what lies between two
_PATIENCE = 3.0  # times the window's seconds, to end with a whole epoch
_STRIDE_SECONDS = 0.2  # of cycles between two looks at a window of several ranks, which cost each a message
MOST_COMPILING_STEPS = 60
MOST_GROWING_STEPS = 60  # an allocator that grows for ever is no reason not to measure

log = logging.getLogger("autocompile.slice")


class RecompileStorm(Exception):
    """The config does not stop compiling; the message says what was seen."""


class Watch(Protocol):
    """What must stand still before and during a window; recording a CUDA graph counts as a compile."""

    def n_compiles(self) -> int: ...
    def limit_hits(self) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """One optimizer step, and what to do around it. ``step`` returns the loss as a tensor and does not synchronise.

    ``shape_steps`` are the steps from the stream's beginning until every shape that soon comes has come,
    ``epoch_steps`` those after which the same batches come again, 1 where all are alike or nobody knows. ``evaluate``,
    if there is one, is called after every ``eval_every`` of a window's steps, first after the third at the latest, and
    after each of warm-up. All ranks of ``group`` take the same steps.
    """

    step: Callable[[], torch.Tensor]
    watch: Watch
    device: torch.device
    stepped: Callable[[], None]  # told after each step, for deadlines and the live view
    waited_seconds: Callable[[], float]  # for batches, in all steps so far
    nvml: Nvml | None  # of a GPU, where it answers
    shape_steps: int = 0
    epoch_steps: int = 1
    evaluate: Callable[[], None] | None = None
    eval_every: int = 1
    group: Group = ALONE

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one window saw.

    A cycle's seconds are what training sees, so they hold the device's wait for batches, ``data_wait_seconds`` a cycle,
    but no evaluation, whose mean is ``eval_seconds``. ``flags`` say why the window is not to be trusted. ``losses`` are
    those of every cycle since warm-up, of windows that did not count too; the last ``step_seconds.n`` are this one's.
    """

    step_seconds: StepSeconds
    mean_seconds: float
    data_wait_seconds: float
    eval_seconds: float | None
    gpu: GpuState | None
    flags: tuple[Degradation, ...]
    losses: tuple[float, ...]


def warm_up(stepper: Stepper, plan: SlicePlan) -> list[float]:
    """Step until nothing compiles, records or grows any more, and a GPU has been busy for a while; returns the losses.

    Raises RecompileStorm if a recompile limit was hit or compiling does not end.
    """
    preheat_seconds = plan.preheat_seconds if stepper.device.type == "cuda" else 0.0
    losses: list[float] = []
    n_compiling, noisy_step, noisy_time = 0, 0, time.perf_counter()
    while not stepper.group.all(
        is_warm(
            steps=len(losses),
            shape_steps=stepper.shape_steps,
            quiet_steps=len(losses) - noisy_step,
            quiet_seconds=time.perf_counter() - noisy_time,
            preheat_seconds=preheat_seconds,
        )
    ):
        compiles, reserved = stepper.watch.n_compiles(), stepper.reserved_bytes()
        losses.append(float(stepper.step()))  # reading the loss waits for the step
        if stepper.evaluate:
            stepper.evaluate()
        stepper.stepped()
        compiled = stepper.watch.n_compiles() != compiles
        n_compiling += compiled
        if compiled or (stepper.reserved_bytes() != reserved and len(losses) <= MOST_GROWING_STEPS):
            noisy_step, noisy_time = len(losses), time.perf_counter()
        if n_compiling == MOST_COMPILING_STEPS:
            raise RecompileStorm(f"still compiling after {len(losses)} steps")
        if hits := stepper.watch.limit_hits():
            raise RecompileStorm(f"recompile limit hit: {hits[0]} runs eager since")
    return losses


def is_warm(*, steps: int, shape_steps: int, quiet_steps: int, quiet_seconds: float, preheat_seconds: float) -> bool:
    """Whether a window may begin, after so many steps in all, and so many steps and seconds since the last noise."""
    return steps >= max(WARMUP_STEPS, shape_steps) and quiet_steps >= QUIET_STEPS and quiet_seconds >= preheat_seconds


def steady_window(stepper: Stepper, plan: SlicePlan) -> Window:
    """A window that counts: one with a compile inside is void, one that was disturbed is repeated, each of them once.

    Raises RecompileStorm at the second compile, or where a recompile limit was hit. A second disturbance stays as the
    window's flag.
    """
    losses: tuple[float, ...] = ()
    voided = repeated = False
    while True:
        before = stepper.watch.n_compiles()
        window = _window(stepper, plan)
        losses += window.losses
        if hits := stepper.watch.limit_hits():
            raise RecompileStorm(f"recompile limit hit: {hits[0]} runs eager since")
        if stepper.group.any(stepper.watch.n_compiles() != before):
            if voided:
                raise RecompileStorm("compiled again inside two windows in a row")
            voided = True
            losses += tuple(warm_up(stepper, plan))
        elif stepper.group.any(bool(window.flags)) and plan.repeats and not repeated:
            repeated = True
            log.warning("window repeated: %s, %s", " and ".join(window.flags) or "for another rank", window.gpu)
        else:
            return replace(window, losses=losses)


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


@dataclass
class _Cycles:
    """Those of a window: each is one interval of the clock, and so is each evaluation between them."""

    stepper: Stepper
    clock: Clock
    losses: list[torch.Tensor] = field(default_factory=list)
    evaluations: set[int] = field(default_factory=set)  # which of the intervals
    looked_at: int = 0  # how many cycles there were when their interval was last computed

    def turn(self) -> None:
        stepper = self.stepper
        self.losses.append(stepper.step())
        self.clock.tick()
        every = stepper.eval_every
        if stepper.evaluate and len(self.losses) % every == min(every, _FIRST_EVALUATION) % every:
            stepper.evaluate()
            self.clock.tick()
            self.evaluations.add(len(self.losses) + len(self.evaluations))
        stepper.stepped()
        self.clock.read()

    def to_come(self, plan: SlicePlan, passed: float) -> int:
        """Cycles until the next look at the window after so many seconds of it, 0 where it is over."""
        n = len(self.losses)
        stride = 1 if self.stepper.group.world_size == 1 else max(1, int(_STRIDE_SECONDS * n / passed))
        if n % self.stepper.epoch_steps and passed < _PATIENCE * plan.window_seconds:
            # parts of an epoch hold more or fewer tokens a step than the whole
            return min(stride, self.stepper.epoch_steps - n % self.stepper.epoch_steps)
        done = len(self.clock.seconds) - len(self.evaluations)
        if done >= plan.min_cycles and passed > plan.window_seconds:
            return 0
        if done >= max(plan.min_cycles, 1.1 * self.looked_at):  # sorting them after each would slow short cycles
            self.looked_at = done
            if is_narrow(self.split(self.clock.seconds)[0], plan.interval):
                return 0
        return stride

    def split(self, seconds: Sequence[float]) -> tuple[list[float], list[float]]:
        """Of these intervals the cycles and the evaluations."""
        cycles = [one for index, one in enumerate(seconds) if index not in self.evaluations]
        return cycles, [one for index, one in enumerate(seconds) if index in self.evaluations]


def _window(stepper: Stepper, plan: SlicePlan) -> Window:
    """On a GPU one event a cycle, read as they complete, and no synchronisation until the end."""
    with GpuWatch(stepper.nvml) as gpu:
        stepper.synchronise()
        clock = clock_of(stepper.device)
        turns = _Cycles(stepper, clock)
        waited, began = stepper.waited_seconds(), time.perf_counter()
        clock.tick()
        to_come = 1
        while to_come:
            for _ in range(to_come):
                turns.turn()
            to_come = stepper.group.of_first(turns.to_come(plan, time.perf_counter() - began))
        stepper.synchronise()
        wall_seconds = time.perf_counter() - began
        clock.read()
    intervals, agree = reconciled(clock.seconds, wall_seconds)
    seconds, evaluations = turns.split(intervals)
    if not agree:
        log.warning("the window took %.3f s, its cycles %.3f s in sum", wall_seconds, sum(clock.seconds))
    return Window(
        step_seconds=median_interval(seconds),
        mean_seconds=fmean(seconds),
        data_wait_seconds=(stepper.waited_seconds() - waited) / len(turns.losses),
        eval_seconds=fmean(evaluations) if evaluations else None,
        gpu=gpu.state,
        flags=tuple(dict.fromkeys((*gpu.flags, *(() if agree else ("disturbed",))))),
        losses=tuple(float(loss) for loss in turns.losses),
    )


def is_narrow(seconds: Sequence[float], interval: float) -> bool:
    """Whether the median is known this well; never where no interval is asked for, since times can be equal.

    Fewer than 8 samples have no 95 % interval inside their range worth the name.
    """
    if interval == 0 or len(seconds) < 8:
        return False
    found = median_interval(seconds)
    return found.high - found.low <= 2 * interval * found.median
