"""The micro-batches of each optimizer step, how long the device waits for them, and how much is in them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from autocompile.workloads.job import Job, WorkloadError
from autocompile.workloads.training import tensors

_CYCLES_LOOKED_AT = 64
_LOOKING_SECONDS = 2.0

Cycle: TypeAlias = list[object]


def cycles(job: Job, n_micro_batches: int) -> Iterator[Cycle]:
    """The workload's stream in order; it begins again where it ends. WorkloadError if nothing comes then."""
    stream = _endless(job)
    while True:
        yield list(itertools.islice(stream, n_micro_batches))


def _endless(job: Job) -> Iterator[object]:
    while True:
        empty = True
        for batch in job.batches():
            empty = False
            yield batch
        if empty:
            raise WorkloadError("batches() gave nothing when begun again; it should start anew each time")


def steps_to_all_shapes(job: Job, n_micro_batches: int) -> int:
    """How many cycles of a fresh stream hold every shape that comes soon; a loader that takes long is not awaited."""
    seen: set[tuple[torch.Size, ...]] = set()
    steps, began = 0, time.monotonic()
    for number, cycle in enumerate(itertools.islice(cycles(job, n_micro_batches), _CYCLES_LOOKED_AT), 1):
        shapes = {tuple(tensor.shape for tensor in tensors(batch)) for batch in cycle}
        if not shapes <= seen:
            seen |= shapes
            steps = number
        if time.monotonic() - began > _LOOKING_SECONDS:
            break
    return steps


def steps_of_an_epoch(job: Job, n_micro_batches: int) -> int:
    """After how many cycles the same micro-batches come in the same cycles again; 1 where nobody knows."""
    return 1 if job.epoch is None else job.epoch // math.gcd(job.epoch, n_micro_batches)


class Waited:
    """These cycles, and for how long the device stood still because one was not there yet.

    The host's time in the loader would tell something else on a GPU: a plain ``.to(device)`` in it waits for all that
    was queued before, and the GPU works on meanwhile.
    """

    def __init__(self, source: Iterator[Cycle], device: torch.device) -> None:
        self._source = source
        self._device = device
        self._seconds = 0.0
        self._gaps: list[tuple[Any, Any]] = []

    def __iter__(self) -> Iterator[Cycle]:
        return self

    def __next__(self) -> Cycle:
        if self._device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()  # reached when the GPU has done all that was queued
            cycle = next(self._source)
            after.record()
            self._gaps.append((before, after))
            return cycle
        began = time.perf_counter()
        cycle = next(self._source)
        self._seconds += time.perf_counter() - began
        return cycle

    def seconds(self) -> float:
        """In all cycles taken so far, those that the GPU has reached."""
        while self._gaps and self._gaps[0][1].query():
            before, after = self._gaps.pop(0)
            self._seconds += before.elapsed_time(after) / 1e3
        return self._seconds


def tokens_of_cycles(job: Job, n_micro_batches: int, *, before: int, n: int, passed: Callable[[], None]) -> list[int]:
    """Of each cycle of the window, whose batches a fresh stream repeats; keeping them would cost memory.

    A slow loader makes this as long as the window was, so ``passed`` is told of each cycle that it went through.
    """
    tokens: list[int] = []
    for number, cycle in enumerate(itertools.islice(cycles(job, n_micro_batches), before + n)):
        if number >= before:
            tokens.append(sum(job.tokens(batch) for batch in cycle))
        passed()
    return tokens


def evaluation(job: Job, device: torch.device) -> Callable[[], None]:
    """One step of it: the loss of a batch of a stream of its own, in eval mode and without gradients."""
    batches = cycles(job, 1)

    def evaluate() -> None:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        modes = [(module, module.training) for module in job.model.modules()]  # a script may keep parts in eval mode
        job.model.eval()
        try:
            with torch.no_grad():
                job.loss(job.model, next(batches)[0])
        finally:
            for module, training in modes:
                module.training = training

    return evaluate
