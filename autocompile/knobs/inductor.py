"""Settings of the compiler behind torch.compile: which kernels inductor makes, and what the partitioner keeps.

A value that is torch's own default is left unset, so that it does not undo what the mode sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autocompile.knob_table import KNOBS
from autocompile.knobs.setup import Setup, knob


def _option(name: str) -> Callable[[Setup, Any], Setup]:
    """One of torch._inductor.config's, set for what is compiled here and nothing else in the process."""

    def apply(setup: Setup, value: Any) -> Setup:
        if value == KNOBS[name].default or setup.options.get("backend", "inductor") != "inductor":
            return setup.did(name, "left to torch")
        options = {**setup.options.get("options", {}), name: value}
        return setup.did(name, str(value).lower(), options={**setup.options, "options": options})

    return apply


for _name in (name for name, row in KNOBS.items() if row.inductor and name != "mode"):
    knob(_name)(_option(_name))


@knob("activation_memory_budget")
def activation_memory_budget(setup: Setup, budget: float) -> Setup:
    """The share of a graph's activations that its forward pass may keep; the rest is computed again. Process-wide.

    1 keeps all, 0 only the graph's inputs, as checkpointing each region would (torch._functorch.config).
    """
    if budget == KNOBS["activation_memory_budget"].default:
        return setup.did("activation_memory_budget", "left to torch")
    from torch._functorch import config

    config.activation_memory_budget = budget
    return setup.did("activation_memory_budget", f"{budget:g} of each graph's activations, for the whole process")
