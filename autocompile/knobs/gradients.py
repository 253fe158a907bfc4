"""Which activations get gradients, where nothing that is trained asks for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autocompile.knobs.setup import Setup, input_embedding, knob


@knob("input_gradients")
def input_gradients(setup: Setup, on: bool) -> Setup:
    """Let the embedding's output require a gradient, as gradient checkpointing does for adapters.

    Else the first of equal layers gets an input without one, and a graph of its own; with it all layers share one, for
    one more product in its backward pass.
    """
    if not on:
        return setup.did("input_gradients", "off")
    embedding = input_embedding(setup.model)
    assert embedding is not None  # or the config was refused
    embedding.register_forward_hook(_require_gradient)
    return setup.did("input_gradients", "required from the embedding on")


def _require_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_(True)
