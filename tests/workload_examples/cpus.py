"""A small workload that ends as soon as its processes wrote into a folder which CPUs they may use."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile

from autocompile import Context, Job


def seen(rank: int) -> dict[str, list[int] | int]:
    """Of this process, all its threads, and the first rank's compile workers, which one thread would not start."""
    threads = set().union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")))
    n_compile_threads = torch._inductor.config.compile_threads
    torch._inductor.config.compile_threads = 2
    return {
        "process": sorted(os.sched_getaffinity(0)),
        "threads": sorted(threads),
        "worker": sorted(AsyncCompile.process_pool().submit(os.sched_getaffinity, 0).result()) if rank == 0 else [],
        "n_threads": torch.get_num_threads(),
        "n_compile_threads": n_compile_threads,
    }


def build(ctx: Context) -> Job:
    torch.manual_seed(ctx.seed)
    calls = itertools.count()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value = (model(batch) ** 2).mean() + 1
        if next(calls) == 5:  # what was compiled runs by now
            Path(str(ctx.options["folder"]), f"seen{ctx.rank}.json").write_text(json.dumps(seen(ctx.rank)))
            if ctx.world_size > 1:
                dist.barrier()  # the first that fails ends the others
            raise RuntimeError("seen")
        return value

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(ctx.seed)
        while True:
            yield torch.randn(ctx.micro_batch, 8, generator=generator)

    return Job(model=nn.Sequential(nn.Linear(8, 8), nn.Tanh()), loss=loss, batches=batches)
