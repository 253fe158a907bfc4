"""Knobs of the batch: they change what the training script feeds, not the model."""

from __future__ import annotations

from dataclasses import replace

from autocompile.knobs.setup import Setup, knob


@knob("micro_batch")
def micro_batch(setup: Setup, size: int) -> Setup:
    """Samples per forward. A slice's batches are built with it; a script sets it in its data loader."""
    return replace(setup, yours={**setup.yours, "micro_batch": f"feed {size} samples per forward on each device"})


@knob("padding")
def padding(setup: Setup, policy: str) -> Setup:
    """How wide a batch of sequences of different lengths is; a script's collator decides that."""
    how = {
        "fixed": "pad to one length",
        "longest": "pad to the longest of the batch",
        "packed": "pack them into rows of one length, with position_ids and a 4-D mask that keeps them apart",
    }
    what = how.get(policy, f"pad to the next multiple of {policy.removeprefix('bucket:')} tokens")
    return replace(setup, yours={**setup.yours, "padding": f"sequences of different lengths: {what}"})


@knob("optimizer")
def optimizer(setup: Setup, name: str) -> Setup:
    """Which implementation of AdamW steps, by Trainer's names; it changes no graph."""
    how = {
        "adamw_torch_fused": "torch.optim.AdamW(..., fused=True)",
        "adamw_torch": "torch.optim.AdamW(..., foreach=True)",
        "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
        "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
    }
    return replace(setup, yours={**setup.yours, "optimizer": f"use {how[name]}"})
