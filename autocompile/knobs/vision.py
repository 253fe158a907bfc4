"""Knobs that matter most to convolutional networks, whose weights are often fp32."""

from __future__ import annotations

from dataclasses import replace

import torch

from autocompile.knobs.setup import Setup, knob


@knob("channels_last")
def channels_last(setup: Setup, on: bool) -> Setup:
    """Weights of convolutions in NHWC order, which tensor cores read; activations follow (channels-last tutorial)."""
    if not on:
        return setup.did("channels_last", "off")
    setup.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    feed = "give the model its images with .to(memory_format=torch.channels_last), which spares it a copy"
    setup = setup.did("channels_last", "of all convolutions")
    return replace(setup, yours={**setup.yours, "images": feed})


@knob("float32_matmul_precision")
def float32_matmul_precision(setup: Setup, precision: str) -> Setup:
    """high: products and convolutions of fp32 in TF32 on GPUs that have it; highest: in fp32. Process-wide."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "high"
    torch.backends.cudnn.allow_tf32 = precision == "high"
    return setup.did("float32_matmul_precision", f"{precision}, for the whole process")
