"""The ranks of one slice, and what they decide together: each would end its window at another step, and all hang."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """This process among the ranks. Every method is called by all of them at the same point; alone none waits.

    Decisions travel over gloo, between hosts' memories: no GPU is waited for.
    """

    rank: int = 0
    world_size: int = 1
    gloo: Any = None  # torch's group for all of it

    def of_first(self, number: int) -> int:
        """What rank 0 says."""
        if self.world_size == 1:
            return number
        told = torch.tensor(number)
        dist.broadcast(told, src=0, group=self.gloo)
        return int(told)

    def any(self, flag: bool) -> bool:
        """Whether a rank says so."""
        if self.world_size == 1:
            return flag
        said = torch.tensor(int(flag))
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.gloo)
        return bool(said)

    def all(self, flag: bool) -> bool:
        """Whether every rank says so."""
        return not self.any(not flag)

    def gathered(self, value: Any) -> list[Any]:
        """What each rank holds, in their order; it must be possible to pickle it."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.gloo)
        return found


ALONE = Group()


def joined(device: torch.device, *, deadline_seconds: float) -> Group:
    """The group that torch's launcher described in the environment. Whoever watches the slice sees hangs earlier."""
    on_gpu, timeout = device.type == "cuda", timedelta(seconds=deadline_seconds)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    gloo = dist.new_group(backend="gloo", timeout=timeout)
    return Group(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), gloo=gloo)
