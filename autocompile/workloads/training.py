"""What a training job does unless its workload says otherwise: optimizer, one whole step, counting tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autocompile.knobs.setup import NotApplicable

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
TrainStep: TypeAlias = Callable[[nn.Module, Sequence[Any], Optimizer], Tensor]
Around: TypeAlias = Callable[[nn.Module, bool], AbstractContextManager[object]]

LEARNING_RATE = 1e-4


def fused_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """One kernel for all parameters; also on a CPU."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def foreach_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """A few kernels for all parameters."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=True)


def adamw_8bit(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Moments in 8 bits, block by block (bitsandbytes)."""
    import bitsandbytes

    optimizer: Optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=LEARNING_RATE)
    return optimizer


def paged_adamw_8bit(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The same in memory that moves to the host when the GPU's is full."""
    import bitsandbytes

    optimizer: Optimizer = bitsandbytes.optim.PagedAdamW8bit(parameters, lr=LEARNING_RATE)
    return optimizer


_OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw_torch_fused": fused_adamw,
    "adamw_torch": foreach_adamw,
    "adamw_8bit": adamw_8bit,
    "paged_adamw_8bit": paged_adamw_8bit,
}


def optimizer_of(name: str, device: torch.device) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """The one of this name. Raises NotApplicable where the device or a library is missing."""
    if name.endswith("8bit") and (device.type != "cuda" or find_spec("bitsandbytes") is None):
        missing = "a GPU" if device.type != "cuda" else "bitsandbytes: pip install 'torch-autocompile[qlora]'"
        raise NotApplicable(f"optimizer {name}: needs {missing}")
    return _OPTIMIZERS[name]


@dataclass(frozen=True)
class AccumulatedStep:
    """One optimizer step over micro-batches of equal weight; returns the mean loss without waiting for the device."""

    loss: Loss | None = None
    scaler: torch.amp.GradScaler | None = None  # of fp16
    around: Around | None = None  # the passes of each micro-batch, told whether it is the last

    def of(self, loss: Loss) -> AccumulatedStep:
        return replace(self, loss=loss)

    def __call__(self, model: nn.Module, batches: Sequence[Any], optimizer: Optimizer) -> Tensor:
        assert self.loss is not None
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, batch in enumerate(batches, 1):
            with self.around(model, number == len(batches)) if self.around else nullcontext():
                loss = self.loss(model, batch) / len(batches)
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            losses.append(loss.detach())
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        return torch.stack(losses).sum()


def count_tokens(batch: Any) -> int:
    """Elements of ``input_ids`` that a (samples, width) mask keeps; of a batch without them, its samples."""
    if not has_tokens(batch):
        return count_samples(batch)
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None or mask.dim() != 2 else mask.sum())


def has_tokens(batch: Any) -> bool:
    return isinstance(batch, Mapping) and "input_ids" in batch


def count_samples(batch: Any) -> int:
    """Rows of the batch's first tensor; 0 if it holds none."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 0)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor that `tensors` finds in it on this device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        values = [moved(value, device) for value in batch]
        return tuple(values) if isinstance(batch, tuple) else values
    return batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a batch, which may be one, or mappings and sequences of them."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for value in batch:
            yield from tensors(value)
