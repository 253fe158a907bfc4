"""Run eager training in another arithmetic than it was written for: all in fp32, or with every result rounded anew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

_LOW = (torch.bfloat16, torch.float16)
_ROUNDINGS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 128.0}


class Float32(TorchDispatchMode):
    """Inside, what asks for bf16 or fp16 gets fp32: autocast, a cast in the model's code, a tensor it kept aside.

    ``replaced`` says whether anything asked. Not covered: a kernel that chooses its own dtype or refuses fp32, and a
    low-precision tensor that is written to in place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replaced = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.is_view or func._schema.is_mutable:  # a copy would break the alias
            return func(*args, **(kwargs or {}))
        return func(*tree_map(self._raised, args), **tree_map(self._raised, dict(kwargs or {})))

    def _raised(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _LOW:
            self.replaced = True
            return value.float()
        if isinstance(value, torch.dtype) and value in _LOW:
            self.replaced = True
            return torch.float32
        return value


class RoundedAnew(TorchDispatchMode):
    """Inside, every result on the way to and from the loss is off by a random part of a rounding of its dtype.

    Monte Carlo arithmetic (Parker 1997): what such noise changes, the same operations in another order may change. In
    fp32 it is that of many roundings: sums in another order lose so much, and what one rounding does seldom, such as
    to push an element to the other side of a ReLU, must be seen to happen. Left alone is what no gradient flows
    through, such as masks and positions, whose values may have to be exact.
    """

    def __init__(self, device: torch.device, draw: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(device).manual_seed(draw)  # the workload's own numbers stay as they are

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        exact = func.is_view or func._schema.is_mutable
        return result if exact or not _has_gradient(args) else tree_map(self._rounded, result)

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _ROUNDINGS or value.device != self._generator.device:
            return value
        most = _ROUNDINGS[value.dtype] * torch.finfo(value.dtype).eps / 2
        noise = torch.empty_like(value, dtype=torch.float32).uniform_(1 - most, 1 + most, generator=self._generator)
        rounded = noise.mul_(value).to(value.dtype)
        return torch.where(rounded.isinf(), value, rounded)  # a mask's largest number must not become infinite


def _has_gradient(args: tuple[Any, ...]) -> bool:
    """In a forward pass through its inputs; a backward pass computes nothing else."""
    if torch.is_grad_enabled():
        return tree_any(lambda value: isinstance(value, Tensor) and value.requires_grad, args)
    return torch._C._current_autograd_node() is not None


def to_float32(model: nn.Module) -> bool:
    """Cast its bf16 and fp16 parameters and buffers in place; whether there were any. Packed weights stay as they are.

    By hand, since transformers refuses `.float()` for a quantised model.
    """
    found = [tensor for tensor in itertools.chain(model.parameters(), model.buffers()) if tensor.dtype in _LOW]
    for tensor in found:
        tensor.data = tensor.data.float()
    return bool(found)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Matrix products and convolutions of fp32 in fp32, although the workload may have allowed less."""
    backends: Any = torch.backends
    places = [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    ]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
