"""Train one job on several GPUs: wrap its model after the knobs were applied, and take its step through the wrapper.

The order is checkpoint, compile, wrap (torchtitan's for FSDP2; DDP cuts graphs at the borders of its buckets only where
it is outside of what is compiled).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autocompile.knobs import Setup
from autocompile.knobs.setup import modules_of
from autocompile.spec import Parallel, WorkloadSpec
from autocompile.workloads.job import Job, trainable
from autocompile.workloads.training import AccumulatedStep, Loss

Gradient: TypeAlias = Callable[[nn.Parameter], Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A job as its ranks train it. ``gradient`` gives a parameter's whole gradient, reduced over the ranks, between the
    last backward pass and the optimizer; all ranks ask for it, and in the same order."""

    job: Job
    optimizer: Optimizer
    gradient: Gradient


@dataclass(frozen=True)
class EngineStep:
    """One optimizer step of an engine, which divides each loss by the number of micro-batches and steps after the last.

    ``before_step`` is called when all gradients are there.
    """

    loss: Loss
    before_step: Callable[[], None] | None = None

    def __call__(self, engine: nn.Module, batches: Sequence[Any], optimizer: Optimizer) -> Tensor:
        losses = []
        for number, batch in enumerate(batches, 1):
            loss = self.loss(engine, batch)
            engine.backward(loss)  # type: ignore[operator]
            losses.append(loss.detach())
            if self.before_step and number == len(batches):
                self.before_step()
            engine.step()  # type: ignore[operator]
        return torch.stack(losses).mean()


def setup_of(job: Job, workload: WorkloadSpec) -> Setup:
    """The job's model before any knob."""
    return Setup(
        model=job.model,
        regions=job.regions,
        parallel=workload.parallel,
        deepspeed_config=workload.deepspeed_config or {},
    )


def wrapped(job: Job, setup: Setup, *, n_micro_batches: int) -> Wrapped:
    """The job as the ranks of torch's default process group train it, ``n_micro_batches`` an optimizer step each.

    Raises MachineFault where a library is missing, WorkloadError where the workload does itself what a wrapper does.
    """
    parallel = Parallel(setup.parallel)
    if parallel is Parallel.NONE:
        return Wrapped(job=job, optimizer=job.optimizer(trainable(job.model)), gradient=own_gradient)
    if parallel is Parallel.DDP:
        return _ddp(job, setup)
    if parallel is Parallel.FSDP:
        return _fsdp(job, setup)
    from autocompile.workloads.zero import zero

    return zero(job, setup, n_micro_batches=n_micro_batches)


def own_gradient(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def _ddp(job: Job, setup: Setup) -> Wrapped:
    device = next(job.model.parameters()).device
    devices = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(job.model, device_ids=devices, **setup.wrapper)
    job = _stepping(replace(job, model=model), _without_sync)
    return Wrapped(job=job, optimizer=job.optimizer(trainable(job.model)), gradient=own_gradient)


def _fsdp(job: Job, setup: Setup) -> Wrapped:
    """Each layer a group of its own, whose weights are gathered before it and freed after it.

    A group has one dtype, so adapters get that of the weights beside them.
    """
    frozen = next((parameter for parameter in job.model.parameters() if not parameter.requires_grad), None)
    if frozen is not None:
        for parameter in trainable(job.model):
            parameter.data = parameter.data.to(frozen.dtype)
    for layer in modules_of(setup, "layer").values():
        fully_shard(layer, **setup.wrapper)
    policy = {name: value for name, value in setup.wrapper.items() if name == "mp_policy"}
    fully_shard(job.model, **policy)  # what is left stays gathered, since the backward pass begins with it
    job = _stepping(job, _with_sync_at_the_end)
    return Wrapped(job=job, optimizer=job.optimizer(trainable(job.model)), gradient=_gathered)


def _gathered(parameter: nn.Parameter) -> Tensor | None:
    gradient: Any = parameter.grad
    return None if gradient is None else gradient.full_tensor()


def _stepping(job: Job, context: Callable[[nn.Module, bool], AbstractContextManager[object]]) -> Job:
    """A workload's own step decides itself when gradients are reduced: after each backward pass, if it does nothing."""
    if not isinstance(job.train_step, AccumulatedStep):
        return job
    return replace(job, train_step=replace(job.train_step, around=context))


def _without_sync(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    assert isinstance(model, DistributedDataParallel)
    return nullcontext() if last else model.no_sync()


@contextmanager
def _with_sync_at_the_end(model: nn.Module, last: bool) -> Iterator[None]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    yield
