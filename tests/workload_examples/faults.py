"""A small workload that goes wrong in the way that its option ``fault`` names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from autocompile import Context, Job

N_BLOCKS = 12


class Block(nn.Module):
    def __init__(self, index: int, fault: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1 if fault == "dropout" else 0.0)
        self.index = index
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(self.linear(x))
        if self.fault == "index" and self.index % 2:  # dynamo guards on the value of the attribute
            out = out * self.index
        if self.fault == "random":  # drawn by hand, so nobody else can switch it off
            out = out * (torch.rand_like(out) > 0.3)
        if self.fault == "branch" and out.sum() > 0:
            out = out + 1
        if self.fault == "wrong when compiled" and torch.compiler.is_compiling():
            out = out * 3
        return out.tanh()


class Net(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, fault) for index in range(N_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(ctx: Context) -> Job:
    fault = str(ctx.options.get("fault", ""))
    torch.manual_seed(ctx.seed)
    calls = itertools.count()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value = (model(batch) ** 2).mean() + 1
        late = next(calls) > 2
        if fault == "out of memory" and late:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return value * float("nan") if fault == "nan" and late else value

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(ctx.seed)
        for number in itertools.count():
            rows = ctx.micro_batch + (number % 5 if fault == "sizes" else 0)
            yield torch.randn(rows, 8, generator=generator)

    return Job(model=Net(fault), loss=loss, batches=batches)
