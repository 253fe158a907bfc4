"""One row per knob: which values it takes, what it is when nobody sets it, and what it touches. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from autocompile.values import shown

KnobValue: TypeAlias = bool | int | float | str

SCOPES = ("none", "model", "layer", "attention", "mlp")
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
AUTOTUNE_MODES = ("max-autotune-no-cudagraphs", "max-autotune")


@dataclass(frozen=True, kw_only=True)
class Knob:
    """``values`` are all that exist, or None where any whole number from 1 up is legal.

    ``compiles``: means something only where something is compiled. ``memory``: changes how much memory a
    training step takes, so that an out-of-memory verdict carries over to configs equal in these knobs.
    """

    default: KnobValue
    values: tuple[KnobValue, ...] | None = None
    pattern: bool = False
    compiles: bool = False
    memory: bool = False


KNOBS: dict[str, Knob] = {
    "scope": Knob(default="none", values=SCOPES, pattern=True, memory=True),
    "mode": Knob(default="default", values=MODES, compiles=True, memory=True),
    "fullgraph": Knob(default=False, values=(False, True), compiles=True),
    "dynamic": Knob(default="auto", values=("auto", "marked", "true", "false"), compiles=True),
    "cache_size_limit": Knob(default=8, compiles=True),
    "sdpa": Knob(default="auto", values=("auto", "flash", "efficient", "cudnn", "math"), memory=True),
    "micro_batch": Knob(default=4, memory=True),
    "padding": Knob(default="longest", values=("fixed", "longest", "bucket:64", "bucket:128"), memory=True),
    "gradient_checkpointing": Knob(default=False, values=(False, True), memory=True),
    "input_gradients": Knob(default=False, values=(False, True), compiles=True, memory=True),
    "channels_last": Knob(default=False, values=(False, True), memory=True),
    "float32_matmul_precision": Knob(default="highest", values=("highest", "high")),
}


def is_pattern(scope: KnobValue) -> bool:
    """A scope that holds a dot or a star is an fnmatch pattern on dotted module names."""
    return isinstance(scope, str) and ("." in scope or "*" in scope)


def problem(name: str, value: object) -> str | None:
    """What is wrong with this value for this knob, as the end of a sentence; None if it is legal."""
    knob = KNOBS[name]
    if knob.values is None:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if whole else f"expected a whole number from 1, found {shown(value)}"
    if knob.pattern and isinstance(value, str) and is_pattern(value):
        return None
    if any(value == known and type(value) is type(known) for known in knob.values):
        return None
    wanted = ", ".join(str(known).lower() if isinstance(known, bool) else str(known) for known in knob.values)
    return f"expected one of {wanted}{' or a pattern such as *.q_proj' if knob.pattern else ''}, found {shown(value)}"


def coerce(name: str, value: object) -> object:
    """YAML reads true and false as booleans; for `dynamic` they are the strings of these names."""
    if name == "dynamic" and isinstance(value, bool):
        return "true" if value else "false"
    return value
