"""The environment that turns on torch.compile in Accelerate, and with it in every trainer that is built on it.

``ACCELERATE_DYNAMO_*`` are what accelerate's ``TorchDynamoPlugin`` reads where it is given no arguments; Trainer passes
backend and mode at most. ``TORCHINDUCTOR_*`` are read by torch._inductor.config when torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autocompile.knob_table import KNOBS, KnobValue

_PREFIX = "ACCELERATE_DYNAMO_"
_REGIONAL = "layer"
_NEAREST = {"nested": "model"}  # of scopes that Accelerate has not; of all others its regions are
_INDUCTOR = {
    "coordinate_descent_tuning": "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "shape_padding": "TORCHINDUCTOR_SHAPE_PADDING",
    "max_autotune_gemm_backends": "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS",
}
_CARRIED = ("backend", "mode", "fullgraph", "dynamic", *_INDUCTOR)


@dataclass(frozen=True, kw_only=True)
class Dynamo:
    """``runs`` holds all knobs of compile."""

    environment: Mapping[str, str]
    runs: Mapping[str, KnobValue]
    why: Mapping[str, str]


def dynamo(asked: Mapping[str, KnobValue]) -> Dynamo:
    """The nearest that Accelerate can do."""
    of_compile = {name: knob.default for name, knob in KNOBS.items() if knob.compiles}
    if asked["scope"] == "none":
        return Dynamo(environment={}, runs=_known({**of_compile, "scope": "none"}, asked), why={})
    scope, why = _scope(str(asked["scope"]))
    runs = {**of_compile, **{name: asked[name] for name in _CARRIED}, "scope": scope}
    if asked["dynamic"] == "marked":
        runs["dynamic"] = "auto"
    environment = {
        f"{_PREFIX}BACKEND": str(runs["backend"]).upper(),
        f"{_PREFIX}MODE": str(runs["mode"]),
        f"{_PREFIX}USE_FULLGRAPH": str(runs["fullgraph"]).lower(),
        f"{_PREFIX}USE_REGIONAL_COMPILATION": str(scope == _REGIONAL).lower(),
        **({f"{_PREFIX}USE_DYNAMIC": str(runs["dynamic"])} if runs["dynamic"] != "auto" else {}),
        **{_INDUCTOR[name]: _word(runs[name]) for name in _INDUCTOR if runs[name] != KNOBS[name].default},
    }
    return Dynamo(environment=environment, runs=_known(runs, asked), why=why)


def _known(runs: Mapping[str, KnobValue], asked: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Without the knobs of another way to train."""
    return {name: value for name, value in runs.items() if name in asked}


def _scope(asked: str) -> tuple[str, dict[str, str]]:
    scope = asked if asked in ("model", _REGIONAL) else _NEAREST.get(asked, _REGIONAL)
    if scope == _REGIONAL:
        return scope, {"scope": "Accelerate compiles the repeated layers, and what is beside them module by module"}
    return scope, {}


def _word(value: KnobValue) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
