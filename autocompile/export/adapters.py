"""What trainers of language models say of adapters, each under its own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autocompile.knob_table import KnobValue

ATTENTION = {"auto": "sdpa", "eager": "eager", "flex": "flex_attention"}  # transformers' names


def adapters(asked: Mapping[str, KnobValue], names: Mapping[str, str], **others: Any) -> dict[str, Any]:
    """LoRA's rank, scale and dropout under these names, with what else the trainer asks for; nothing for `full`."""
    if asked["method"] == "full":
        return {}
    return {**{names[field]: asked[field] for field in ("lora.r", "lora.alpha", "lora.dropout")}, **others}


def told(asked: Mapping[str, KnobValue]) -> dict[str, KnobValue | None]:
    """The fields of a model and its method, for formats that carry them all."""
    return {name: asked[name] for name in asked if name in ("sequence_length", "method") or name.startswith("lora.")}


def attention(asked: Mapping[str, KnobValue]) -> tuple[str, dict[str, KnobValue | None]]:
    """transformers' name of the implementation, and what runs then: which kernel of SDPA nobody can say."""
    kind = str(asked["sdpa"]) if asked["sdpa"] in ATTENTION else "auto"
    return ATTENTION[kind], {"sdpa": kind}
