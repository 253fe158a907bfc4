"""Which kernel scaled_dot_product_attention runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autocompile.knobs.setup import Setup, knob, modules_of, set_attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


IMPLEMENTATIONS = {"eager": "eager", "flex": "flex_attention"}  # transformers' names of those that are no such kernel
_IMPLICIT = "autocompile_implicit_causal"


@knob("implicit_causal_mask")
def implicit_causal_mask(setup: Setup, on: bool) -> Setup:
    """Tell the kernel that attention is causal instead of giving it a mask, which keeps flash attention possible.

    transformers does so by itself where it can look at the mask's values, which a trace of the whole model cannot.
    Right for batches without padding or padded at their end, whose padding has no labels.
    """
    if not on:
        return setup.did("implicit_causal_mask", "off")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_IMPLICIT, sdpa_attention_forward)
    AttentionMaskInterface.register(_IMPLICIT, lambda *args, **kwargs: None)
    set_attention(setup.model, _IMPLICIT)
    feed = "no padding before or between tokens: causal attention is told to the kernel without a mask"
    setup = setup.did("implicit_causal_mask", "no mask is made")
    return replace(setup, yours={**setup.yours, "mask": feed})


@knob("sdpa")
def sdpa(setup: Setup, name: str) -> Setup:
    """Force one kernel inside every attention module, or leave the choice to torch (auto).

    The context is entered inside the module's forward, hence inside whatever traces or recomputes it: around the
    model's forward it is gone when non-reentrant checkpointing recomputes, and outside a compiled region it is baked
    into the graph without a guard. A wrapper around the module serves any model's attention, so it stands in for
    transformers' AttentionInterface too. Process-wide flags are the fallback for models without an attention region.
    inductor's disk cache does not know the choice (pytorch#185449), hence the tag.
    """
    torch.compiler.config.cache_key_tag = f"sdpa={name}"
    if name == "auto":
        return setup.did("sdpa", "left to torch")
    if name in IMPLEMENTATIONS:
        set_attention(setup.model, IMPLEMENTATIONS[name])
        return setup.did("sdpa", f"{IMPLEMENTATIONS[name]} instead of it", sdpa_applied="region")
    attention = modules_of(setup, "attention")
    for module in attention.values():
        module.forward = _with_backend(module, BACKENDS[name])
    if attention:
        return setup.did("sdpa", f"{name} in {len(attention)} attention modules", sdpa_applied="region")
    for other, switch in _SWITCHES.items():
        switch(other == name)
    return setup.did("sdpa", f"{name} for the whole process", sdpa_applied="process")


_SWITCHES: dict[str, Callable[[bool], None]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}


def _with_backend(module: nn.Module, backend: SDPBackend) -> Callable[..., Any]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backend):
            return inner(*args, **kwargs)

    return forward
