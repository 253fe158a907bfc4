"""A small workload whose loss tells nothing: compiled, its gradients go wrong as its option ``fault`` names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch._dynamo
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autocompile import Context, Job

WIDTH = 32
FAULTY = "blocks.1.inner.weight"  # the parameter whose gradient is wrong


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5 if fault == "two dropouts" else 0.0)
        self.fault = fault
        self.was_compiled = False

    @torch._dynamo.assume_constant_result
    def as_it_was(self) -> Tensor:
        return self.inner.weight.detach().clone()

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.inner.weight
        if torch.compiler.is_compiling():
            self.was_compiled = True
            if self.fault == "scaled":
                weight = 0.25 * weight + 0.75 * weight.detach()
            elif self.fault == "stale":
                weight = weight + (self.as_it_was() - weight).detach()
        elif self.fault == "scaled":
            time.sleep(0.01)  # so that what is wrong is also the fastest
        outputs = F.silu(F.linear(self.norm(inputs), weight, self.inner.bias))
        if self.fault == "two dropouts":
            outputs = F.dropout(outputs, 0.5)  # of a probability that nobody else can change
        return inputs + self.dropout(outputs)


class Net(nn.Module):
    def __init__(self, depth: int, fault: str) -> None:
        super().__init__()
        faults = [fault if number == 1 or fault not in ("scaled", "stale") else "" for number in range(depth)]
        self.blocks = nn.ModuleList(map(Block, faults))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def overwrite_gradient(block: Block) -> None:
    """Once the block was compiled, each micro-batch's gradient takes the place of what was accumulated."""
    weight, last = block.inner.weight, []

    def keep(gradient: Tensor) -> None:
        last[:] = [gradient]

    def put(parameter: Tensor) -> None:
        if block.was_compiled:
            parameter.grad = last[0].clone()

    weight.register_hook(keep)
    weight.register_post_accumulate_grad_hook(put)


def squared_error(model: nn.Module, batch: Tensor) -> Tensor:
    error: Tensor = (model(batch) - batch.flip(1)).pow(2).mean()
    return error


def random_rows(ctx: Context) -> Callable[[], Iterator[Tensor]]:
    def stream() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(ctx.seed)
        while True:
            yield torch.randn(ctx.micro_batch * 8, WIDTH, generator=generator).to(ctx.dtype)

    return stream


def build(ctx: Context) -> Job:
    torch.manual_seed(ctx.seed)
    fault = str(ctx.options.get("fault", ""))
    model = Net(2, fault).to(ctx.dtype)
    if fault == "overwritten":
        overwrite_gradient(model.blocks[1])
    return Job(model=model, loss=squared_error, batches=random_rows(ctx))


class Rotary(nn.Module):
    """Rotary embeddings in bf16, whatever ctx.dtype: in this range neighbouring numbers are 0.03 to 0.06 apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(inputs.shape[1]).float(), 0.5 ** torch.arange(WIDTH // 2))
        cosine, sine = (torch.cat((wave, wave), -1).to(torch.bfloat16) for wave in (angles.cos(), angles.sin()))
        hidden = self.inner(inputs)
        first, second = hidden.chunk(2, -1)
        return inputs + hidden * cosine + torch.cat((-second, first), -1) * sine


class RotaryNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rotary() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def rotary(ctx: Context) -> Job:
    torch.manual_seed(ctx.seed)

    def stream() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(ctx.seed)
        while True:
            yield (8 * torch.randn(ctx.micro_batch, 32, WIDTH, generator=generator)).to(torch.bfloat16)

    return Job(model=RotaryNet(), loss=squared_error, batches=stream)
