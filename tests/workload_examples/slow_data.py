"""A small workload whose batches take their time: every one of them 20 ms of the host's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import blocks
from torch import Tensor

import autocompile

SECONDS = 0.02


def build(ctx: autocompile.Context) -> autocompile.Job:
    job = blocks.build(ctx)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in job.batches():
            time.sleep(SECONDS)
            yield batch

    return replace(job, batches=batches)
