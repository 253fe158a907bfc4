"""Workloads as a user writes them: a small regression model of repeated blocks, right and wrong in several ways."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

import autocompile

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + torch.relu(self.mlp(inputs))
        return outputs


class Model(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    error: Tensor = (model(inputs) - targets).pow(2).mean()
    return error


def pairs(ctx: autocompile.Context, rows: int) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(ctx.seed)
        while True:
            inputs = torch.randn(rows, WIDTH, generator=generator).to(ctx.device, ctx.dtype)
            yield inputs, inputs.flip(1)

    return stream


def build(ctx: autocompile.Context) -> autocompile.Job:
    torch.manual_seed(ctx.seed)
    model = Model(ctx.depth or int(ctx.options.get("depth", 3))).to(ctx.device, ctx.dtype)
    return autocompile.Job(model=model, loss=squared_error, batches=pairs(ctx, ctx.micro_batch))


def frozen(ctx: autocompile.Context) -> autocompile.Job:
    """Its batches do not follow ctx.micro_batch."""
    return replace(build(ctx), batches=pairs(ctx, 8))


def own_step(ctx: autocompile.Context) -> autocompile.Job:
    def step(model: nn.Module, batches: object, optimizer: torch.optim.Optimizer) -> Tensor:
        raise NotImplementedError

    return replace(build(ctx), train_step=step)


def no_job(ctx: autocompile.Context) -> nn.Module:
    return build(ctx).model


def raises(ctx: autocompile.Context) -> autocompile.Job:
    return build(replace(ctx, depth=int("three")))


def leaves(ctx: autocompile.Context) -> autocompile.Job:
    sys.exit("no data set here")


def no_batches(ctx: autocompile.Context) -> autocompile.Job:
    return replace(build(ctx), batches=lambda: iter(()))


def vector_loss(ctx: autocompile.Context) -> autocompile.Job:
    return replace(build(ctx), loss=lambda model, batch: model(batch[0]).sum(1))


def number_loss(ctx: autocompile.Context) -> autocompile.Job:
    return replace(build(ctx), loss=lambda model, batch: squared_error(model, batch).item())


def detached_loss(ctx: autocompile.Context) -> autocompile.Job:
    return replace(build(ctx), loss=lambda model, batch: squared_error(model, batch).detach())


def broken_loss(ctx: autocompile.Context) -> autocompile.Job:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squared_error(model, (*batch, batch[0]))  # type: ignore[arg-type]  # three tensors where two are wanted

    return replace(build(ctx), loss=loss)


def no_module(ctx: autocompile.Context) -> autocompile.Job:
    return replace(build(ctx), model=build(ctx).model.forward)


def no_function(ctx: autocompile.Context) -> autocompile.Job:
    return replace(build(ctx), batches=[torch.zeros(2, WIDTH)])


def frozen_model(ctx: autocompile.Context) -> autocompile.Job:
    job = build(ctx)
    job.model.requires_grad_(False)
    return job


def compiled_model(ctx: autocompile.Context) -> autocompile.Job:
    job = build(ctx)
    return replace(job, model=torch.compile(job.model))


def compiled_part(ctx: autocompile.Context) -> autocompile.Job:
    job = build(ctx)
    job.model.blocks[1].compile()
    return job


def other_batches(ctx: autocompile.Context) -> autocompile.Job:
    """Drawn from the process's generator, which goes on from stream to stream."""

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            inputs = torch.randn(ctx.micro_batch, WIDTH)
            yield inputs, inputs.flip(1)

    return replace(build(ctx), batches=stream)


def one_stream(ctx: autocompile.Context) -> autocompile.Job:
    """The same iterator each time, which is where it was left."""
    stream = iter([(torch.zeros(ctx.micro_batch, WIDTH), torch.zeros(ctx.micro_batch, WIDTH))])
    return replace(build(ctx), batches=lambda: stream)
