"""A small workload that goes wrong in the way that its option ``fault`` names."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator

import torch
import torch._inductor.config
from torch import Tensor, nn

from autocompile import Context, Job

N_BLOCKS = 12


@torch.compiler.disable
def opaque(x: Tensor) -> Tensor:
    return x + 1


class Block(nn.Module):
    def __init__(self, index: int, fault: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1 if fault == "dropout" else 0.0)
        self.index = index
        self.width = 3 * index + 7
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(self.linear(x))
        if self.fault == "index" and self.index % 2:  # dynamo guards on the value of the attribute
            out = out * self.index
        if self.fault == "attribute":
            out = out * self.width
        if self.fault == "opaque":
            out = opaque(out)
        if self.fault == "data read" and out.sum().item() > 0:
            out = out + 1
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
    fault = str(ctx.options.get("fault", "")) if ctx.options.get("rank", ctx.rank) == ctx.rank else ""
    torch.manual_seed(ctx.seed)
    if fault == "compile threads":
        raise RuntimeError(f"{torch._inductor.config.compile_threads} compile threads")
    calls = itertools.count()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value = (model(batch) ** 2).mean() + 1
        late = next(calls) > 2
        if fault == "out of memory" and late:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if fault == "killed" and late:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang" and late:
            time.sleep(600)
        return value * float("nan") if fault == "nan" and late else value

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(ctx.seed)
        for number in itertools.count():
            rows = ctx.micro_batch + (number % 5 if fault == "sizes" else 0)
            yield torch.randn(rows, 8, generator=generator)

    return Job(model=Net(fault), loss=loss, batches=batches)


class Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.p = p  # of dropout, by a name of its own

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.p, is_causal=True)
        return x + out.transpose(1, 2).reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.attn = Attention(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x).tanh()


def attention(ctx: Context) -> Job:
    """Attention whose dropout has the probability ``p``."""
    torch.manual_seed(ctx.seed)
    p = float(ctx.options.get("p", 0.0))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) ** 2).mean() + 1

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(ctx.seed)
        while True:
            yield torch.randn(ctx.micro_batch, 8, 16, generator=generator)

    return Job(model=nn.Sequential(Layer(p), Layer(p)), loss=loss, batches=batches)
