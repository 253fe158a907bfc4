"""Is the configured model still the same function? Its first loss against an eager forward made before any knob."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from autocompile.slice.flops import counted
from autocompile.workloads.job import Job

TOLERANCE = 0.02  # relative; random weights and bf16 kernels in another order stay far below


class NumericsMismatch(Exception):
    """Losses that are not finite, or not those of eager."""


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[bool]:
    """Every dropout probability zero inside; yields whether there was one to switch off.

    Training mode stays: eval mode would also change batch norm. Functional dropout takes its probability from an
    attribute whose name ends in "dropout", as in transformers' attention modules.
    """
    found: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        names += [name for name, value in vars(module).items() if name.endswith("dropout") and isinstance(value, float)]
        found += [(module, name, getattr(module, name)) for name in names if getattr(module, name) > 0]
    for module, name, _ in found:
        setattr(module, name, 0.0)
    try:
        yield bool(found)
    finally:
        for module, name, value in found:
            setattr(module, name, value)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Eager losses before any knob: of each micro-batch, and how far two draws of the random numbers lie apart."""

    losses: tuple[float, ...]
    spread: float  # relative; 0 where the loss draws no random numbers, or only dropout that can be switched off
    flops: float | None = None  # of training on these micro-batches, where they could be counted


def eager_reference(job: Job, batches: Sequence[object], seed: int) -> Reference:
    """Forward without gradients over these micro-batches, dropout off, twice from different seeds."""

    def draw(number: int) -> tuple[float, ...]:
        torch.manual_seed(number)
        return tuple(float(job.loss(job.model, batch)) for batch in batches)

    with torch.no_grad(), dropout_off(job.model):
        losses, flops = counted(job.model, partial(draw, seed))
        first, second = (sum(drawn) / len(drawn) for drawn in (losses, draw(seed + 1)))
    return Reference(losses=losses, spread=abs(first - second) / abs(first) if first else 0.0, flops=flops)


def compare(first: float, reference: Reference) -> None:
    """Raises NumericsMismatch unless the first step's loss is eager's within the tolerance.

    A workload's own step may return a mean of its micro-batches, weighted by their tokens or not, their sum or the
    last one. Random numbers that cannot be switched off, such as stochastic depth, widen the tolerance to three times
    what they change.
    """
    losses = reference.losses
    tolerance = max(TOLERANCE, 3 * reference.spread)
    mean, total = sum(losses) / len(losses), sum(losses)
    if not math.isfinite(total):
        raise NumericsMismatch(f"the eager loss itself is {mean}")
    ranges = ((min(losses), max(losses)), (total, total))
    if not any(low - tolerance * abs(low) <= first <= high + tolerance * abs(high) for low, high in ranges):
        raise NumericsMismatch(
            f"first loss {first:.6g}, eager {mean:.6g} on the same batch: more than {tolerance:.0%} apart"
        )


def require_finite(losses: Sequence[float]) -> None:
    """Raises NumericsMismatch for a NaN or infinite loss anywhere in the slice."""
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise NumericsMismatch(f"the loss of step {step} is {loss}")
