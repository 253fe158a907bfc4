"""Ways to train a model: all its weights, adapters beside frozen weights, or adapters beside 4-bit ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from autocompile.knobs import default_regions
from autocompile.spec import LoraSpec, Method
from autocompile.workloads.job import MachineFault, WorkloadError

QUANT_TYPE = "nf4"
ADAPTER_STD = 0.01


def require(method: Method) -> None:
    """Raises MachineFault where the method's library is not installed."""
    if method is Method.QLORA and find_spec("bitsandbytes") is None:
        raise MachineFault("qlora needs bitsandbytes: pip install 'torch-autocompile[qlora]'")


def adapted(model: nn.Module, lora: LoraSpec, task: str | None) -> nn.Module:
    """The model with everything frozen and fp32 adapters on all linear layers of its blocks.

    ``task`` is peft's name for what is trained; a new classifier on top is trained with the adapters.
    """
    # Imported here: peft imports bitsandbytes, which looks for a GPU, and only these methods need it.
    from peft import LoraConfig, get_peft_model

    linears = block_linears(model)
    if not linears:
        raise WorkloadError("this model has no linear layers in repeated blocks to put adapters on")
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_one_pattern(linears),
        fan_in_fan_out=any(isinstance(linear, Conv1D) for linear in linears.values()),
        task_type=task,
    )
    wrapped: nn.Module = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:  # at its usual zero, the gradient of A is zero and a check of it proves nothing
                parameter.normal_(0, ADAPTER_STD)
    return wrapped


def block_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers inside the repeated blocks, by dotted name; GPT-2's Conv1D is one by another name."""
    layer = default_regions(model).get("layer")
    if layer is None:
        return {}
    prefix = layer.removesuffix("*")
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(prefix) and isinstance(module, nn.Linear | Conv1D)
    }


def _one_pattern(names: dict[str, nn.Module]) -> str:
    """A regular expression for exactly these names, short however many blocks there are."""
    return "|".join(sorted({re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(name)) for name in names}))


def quantisation(arithmetic: torch.dtype) -> BitsAndBytesConfig:
    """The 4-bit layers that `quantised_construction` makes, as transformers' loader is told of them."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=QUANT_TYPE,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=arithmetic,
    )


@contextmanager
def quantised_construction(blueprint: nn.Module, arithmetic: torch.dtype, *, std: float) -> Iterator[None]:
    """While open, each linear layer of a block turns 4-bit the moment it becomes part of its parent.

    So at most one of them is there unquantised at any time, and all else of the model, buffers that no state dict
    holds included, is built as always. ``blueprint`` is the same model on the meta device: it shows which linear
    layers lie in blocks. Their weights are random with this standard deviation.
    """
    wanted = {_place(blueprint, name) for name in block_linears(blueprint)}
    if not wanted:
        raise WorkloadError("this model has no linear layers in repeated blocks to quantise")

    def quantise(parent: nn.Module, name: str, child: nn.Module | None) -> nn.Module | None:
        if isinstance(child, nn.Linear | Conv1D) and not child.weight.is_meta and (type(parent), name) in wanted:
            return _quantised(child, arithmetic, std)
        return None

    handle = register_module_module_registration_hook(quantise)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _place(model: nn.Module, name: str) -> tuple[type[nn.Module], str]:
    parent, _, child = name.rpartition(".")
    return type(model.get_submodule(parent)), child


def _quantised(linear: nn.Linear | Conv1D, arithmetic: torch.dtype, std: float) -> nn.Module:
    """A bitsandbytes nf4 layer with double quantisation, of random weights in the linear layer's shape and dtype."""
    # Imported here, and by name: it looks for a GPU, and is there only where the qlora extra is.
    nn4bit: Any = import_module("bitsandbytes.nn")
    shape = linear.weight.shape if isinstance(linear, nn.Linear) else linear.weight.shape[::-1]
    weight = torch.empty(shape, dtype=linear.weight.dtype, device=linear.weight.device).normal_(0, std)
    biased = linear.bias is not None
    quantised: nn.Module = nn4bit.Linear4bit(shape[1], shape[0], bias=biased, compute_dtype=arithmetic, device="meta")
    if biased:
        quantised.bias = nn.Parameter(torch.zeros_like(linear.bias), requires_grad=False)
    packed = nn4bit.Params4bit(weight, requires_grad=False, quant_type=QUANT_TYPE, module=quantised)
    quantised.weight = packed.to(weight.device)
    initialised: list[Any] = [quantised, *quantised.parameters()]
    for one in initialised:
        one._is_hf_initialized = True  # else transformers draws its weights again, on packed bytes
    return quantised
