"""What a precision means in training: dtypes, autocast, and TF32 alike everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autocompile.spec import Method, Precision, WorkloadSpec
from autocompile.workloads.training import Loss, TrainStep

# What arithmetic runs in: under autocast for the mixed ones, and as the weights' own dtype for the others.
_COMPUTE = {
    Precision.BF16: torch.bfloat16,
    Precision.BF16_MIXED: torch.bfloat16,
    Precision.FP16_MIXED: torch.float16,
    Precision.FP32: torch.float32,
}


def resolved_precision(workload: WorkloadSpec, device_type: str) -> Precision:
    """The precision asked for, else bf16 on a GPU and fp32 on a CPU, where bf16 arithmetic is mostly emulated."""
    return workload.precision or (Precision.FP32 if device_type == "cpu" else Precision.BF16)


def is_mixed(precision: Precision) -> bool:
    return precision in (Precision.BF16_MIXED, Precision.FP16_MIXED)


def compute_dtype(precision: Precision) -> torch.dtype:
    return _COMPUTE[precision]


def trained_dtype(precision: Precision) -> torch.dtype:
    """Of the weights that a full fine-tune trains: under autocast they stay fp32."""
    return torch.float32 if is_mixed(precision) else _COMPUTE[precision]


def base_dtype(precision: Precision, method: Method) -> torch.dtype:
    """Of the model as it is built: a frozen one needs no fp32 master weights, so autocast's dtype will do."""
    return trained_dtype(precision) if method is Method.FULL else _COMPUTE[precision]


def under_autocast(loss: Loss, precision: Precision, device: torch.device) -> Loss:
    """The loss of a mixed precision; the backward pass follows the dtypes that the forward pass chose."""

    def mixed(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, dtype=compute_dtype(precision)):
            return loss(model, batch)

    return mixed


def step_under_autocast(step: TrainStep, precision: Precision, device: torch.device) -> TrainStep:
    """A workload's own step, whose forward is somewhere inside it."""

    def mixed(model: nn.Module, batches: Sequence[Any], optimizer: Optimizer) -> Tensor:
        with torch.autocast(device.type, dtype=compute_dtype(precision)):
            return step(model, batches, optimizer)

    return mixed


def set_tf32(*, allowed: bool) -> None:
    """Torch's own default differs between matmul (off) and cuDNN (on), and trainers switch it with compile."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
