"""The micro-batches of each optimizer step, how long the host waits for them, and how much is in them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from autocompile.workloads.job import Job

Cycle: TypeAlias = list[object]


def cycles(job: Job, n_micro_batches: int) -> Iterator[Cycle]:
    """The workload's stream in order; it begins again where it ends."""
    stream = itertools.chain.from_iterable(job.batches() for _ in itertools.count())
    while True:
        yield list(itertools.islice(stream, n_micro_batches))


class Waited:
    """These cycles, and in ``seconds`` how long getting those taken so far took; a loader that keeps up takes none."""

    def __init__(self, source: Iterator[Cycle]) -> None:
        self._source = source
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Cycle]:
        return self

    def __next__(self) -> Cycle:
        began = time.perf_counter()
        cycle = next(self._source)
        self.seconds += time.perf_counter() - began
        return cycle


def tokens_per_cycle(job: Job, n_micro_batches: int, *, before: int, n: int, passed: Callable[[], None]) -> float:
    """Mean over the cycles of the window, whose batches a fresh stream repeats; keeping them would cost memory.

    A slow loader makes this as long as the window was, so ``passed`` is told of each cycle that it went through.
    """
    tokens = 0
    for number, cycle in enumerate(itertools.islice(cycles(job, n_micro_batches), before + n)):
        tokens += sum(job.tokens(batch) for batch in cycle) if number >= before else 0
        passed()
    return tokens / n
