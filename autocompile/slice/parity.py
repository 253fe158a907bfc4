"""Is the configured model still the same function? Its first loss against an eager forward made before any knob."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

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


def eager_loss(job: Job, batches: Sequence[object]) -> float:
    """Mean loss over these micro-batches, dropout off, before knobs are applied."""
    with torch.no_grad(), dropout_off(job.model):
        losses = [float(job.loss(job.model, batch)) for batch in batches]
    return sum(losses) / len(losses)


def compare(first: float, eager: float) -> None:
    """Raises NumericsMismatch unless the first loss is eager's within the tolerance."""
    if not math.isfinite(eager):
        raise NumericsMismatch(f"the eager loss itself is {eager}")
    if not math.isfinite(first) or abs(first - eager) > TOLERANCE * abs(eager):
        raise NumericsMismatch(f"first loss {first:.6g}, eager {eager:.6g} on the same batch: more than 2 % apart")


def require_finite(losses: Sequence[float]) -> None:
    """Raises NumericsMismatch for a NaN or infinite loss anywhere in the slice."""
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise NumericsMismatch(f"the loss of step {step} is {loss}")
