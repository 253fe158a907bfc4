"""Arithmetic: how much of it training on some batches is, and how much per second a matrix product reaches here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autocompile.spec import Precision
from autocompile.workloads.precision import compute_dtype, set_tf32

_SIZES = {"cuda": (8192,), "cpu": (256, 512, 1024, 2048)}  # of the square matrices
_SECONDS = {"cuda": 0.5, "cpu": 0.03}  # of products at each size
_LONG_PRODUCT_SECONDS = 0.005  # on a CPU, after which a size 8 times the work would take too long

_BETWEEN_ACTIVATIONS = ("attention", "aten.bmm", "aten.baddbmm")

T = TypeVar("T")

log = logging.getLogger("autocompile.slice")


def counted(model: nn.Module, forward: Callable[[], T]) -> tuple[T, float | None]:
    """What ``forward`` returns, and the floating-point operations of training on it; None where they cannot be counted.

    Recomputation is not counted, nor what a causal mask spares. ``forward`` runs a second time if counting fails.
    """
    try:
        with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
            result = forward()
    except Exception as error:  # be it the counter's or the model's: a model's own comes again below
        log.warning("the model's arithmetic cannot be counted: %s", type(error).__name__, exc_info=True)
    else:
        counts = {str(operator): count for operator, count in counter.get_flop_counts().get("Global", {}).items()}
        return result, training_flops(counts, trainable_share(model)) or None
    return forward(), None


def training_flops(forward: Mapping[str, int], trainable: float) -> float:
    """Of a forward pass, by operator, and its backward pass: as much again for the gradients of each operand.

    A product of two activations has two that need one. Of the weights only this share is trained.
    """
    return sum(
        count * (3 if any(name in operator for name in _BETWEEN_ACTIVATIONS) else 2 + trainable)
        for operator, count in forward.items()
    )


def trainable_share(model: nn.Module) -> float:
    """Of the elements of all weights in matrix products; embeddings are looked up, not multiplied."""
    matrices = list(_matrices(model))
    trained = sum(_elements(matrix) for matrix in matrices if matrix.requires_grad)
    return trained / max(1, sum(map(_elements, matrices)))


def matmul_flops_per_second(device: torch.device, precision: Precision) -> float | None:
    """The best of many large square products, in what this precision computes in; None where they cannot run."""
    set_tf32(allowed=False)  # as it is in every slice
    best = 0.0
    try:
        for size in _SIZES[device.type]:
            seconds = _best_seconds(size, device, compute_dtype(precision))
            best = max(best, 2 * size**3 / seconds)
            if seconds > _LONG_PRODUCT_SECONDS:
                break
    except RuntimeError as error:  # no room left for the matrices, or no such product in this dtype
        log.warning("no matrix product to compare with: %s", str(error).splitlines()[0])
        return None
    return best


def _formulas() -> dict[Any, Callable[..., int]]:
    """Of operators that torch's own counter leaves out, or counts only with as many key as query heads."""
    aten = torch.ops.aten
    attention = [
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    ]
    formulas: dict[Any, Callable[..., int]] = dict.fromkeys(attention, _attention_flops)
    formulas[aten._grouped_mm] = _grouped_flops
    if (four_bit := getattr(torch.ops.bitsandbytes, "gemm_4bit", None)) is not None:
        formulas[four_bit] = _four_bit_flops
    return formulas


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _grouped_flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(left) * right[-1]


def _four_bit_flops(left: Sequence[int], packed: Sequence[int], shape: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(left) * shape[0]


def _matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            yield from (own for own in module.parameters(recurse=False) if own.dim() > 1)


def _elements(matrix: nn.Parameter) -> int:
    """Of the matrix that it stands for: bitsandbytes packs two into a byte."""
    quantised = getattr(matrix, "quant_state", None)
    return matrix.numel() if quantised is None else math.prod(quantised.shape)


def _best_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Random numbers: a GPU draws less power, and so clocks higher, on zeros.
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    _product_seconds(left, right, product)  # the first one loads the library
    best, began = math.inf, time.perf_counter()
    while time.perf_counter() - began < _SECONDS[device.type] or math.isinf(best):
        best = min(best, _product_seconds(left, right, product))
    return best


def _product_seconds(left: Tensor, right: Tensor, product: Tensor) -> float:
    if left.device.type == "cpu":
        began = time.perf_counter()
        torch.mm(left, right, out=product)
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(left.device):
        start.record()
        torch.mm(left, right, out=product)
        end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
