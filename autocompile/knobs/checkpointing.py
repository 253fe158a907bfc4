"""Trade arithmetic for memory: recompute a layer's activations in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from autocompile.knobs.setup import Setup, knob, modules_of


@knob("gradient_checkpointing")
def gradient_checkpointing(setup: Setup, on: bool) -> Setup:
    """Checkpoint each layer, non-reentrant, inside the layer's own forward.

    transformers places its own checkpoint inside or outside a compiled layer depending on its version, and with
    PEFT it makes the embedding's output require gradients, which a whole-model trace cannot follow. Inside the
    forward it is the same for every scope and version: within the graph of a compiled layer or model, and around
    the graphs of a compiled attention or mlp.
    """
    # transformers keeps the switch on its modules, and the name of the model's own question changes.
    switched_on = any(getattr(module, "gradient_checkpointing", False) is True for module in setup.model.modules())
    if switched_on and hasattr(setup.model, "gradient_checkpointing_disable"):
        setup.model.gradient_checkpointing_disable()  # type: ignore[operator]  # else it would be done twice, or still
    if not on:
        return setup.did("gradient_checkpointing", "off")
    layers = modules_of(setup, "layer")
    for layer in layers.values():
        layer.forward = _checkpointed(layer)
    what = f"each of {len(layers)} layers, use_reentrant=False"
    return setup.did("gradient_checkpointing", what, checkpointing="inside")


def _checkpointed(layer: nn.Module) -> Callable[..., Any]:
    inner = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return forward
