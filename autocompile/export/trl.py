"""The file that TRL's parser reads (`--config`): SFTConfig, ModelConfig, and the environment under ``env``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from autocompile.best_file import BestConfig
from autocompile.export.fields import Export, fields
from autocompile.export.hf_trainer import arguments, of_trainer
from autocompile.knob_table import KnobValue

_ATTENTION = {"eager": "eager", "flex": "flex_attention"}
_CARRIED = ("sequence_length", "method", "precision", "lora.r", "lora.alpha", "lora.dropout")


def trl(best: BestConfig) -> Export:
    """The parser sets ``env`` after torch was imported, which is too late for what inductor reads."""
    asked = fields(best)
    carried = [*_CARRIED]
    if asked["padding"] == "packed":
        carried.append("padding")
    if asked["sdpa"] in _ATTENTION:
        carried.append("sdpa")
    keys = {**arguments(best), **_sft(asked), **_model(asked)}
    found = of_trainer(best, keys, *carried, start="-m trl.scripts.sft --config FILE")
    inside = {name: value for name, value in found.environment.items() if not name.startswith("TORCHINDUCTOR_")}
    outside = {name: value for name, value in found.environment.items() if name not in inside}
    text = yaml.safe_dump({**keys, **({"env": inside} if inside else {})}, sort_keys=False)
    return replace(found, text=text, environment=outside)


def _sft(asked: dict[str, KnobValue]) -> dict[str, Any]:
    """TRL's own defaults checkpoint, and train in bf16."""
    checkpoints = bool(asked["gradient_checkpointing"])
    return {
        "gradient_checkpointing": checkpoints,
        "max_length": asked["sequence_length"],
        "packing": asked["padding"] == "packed",
    }


def _model(asked: dict[str, KnobValue]) -> dict[str, Any]:
    half = asked["precision"] == "bf16" or (asked["method"] != "full" and asked["precision"] != "fp32")
    found = {
        "dtype": "bfloat16" if half else "float32",
        "attn_implementation": _ATTENTION.get(str(asked["sdpa"]), "sdpa"),
    }
    if asked["method"] == "full":
        return found
    adapters = {
        "use_peft": True,
        "lora_r": asked["lora.r"],
        "lora_alpha": asked["lora.alpha"],
        "lora_dropout": asked["lora.dropout"],
        "lora_target_modules": "all-linear",
    }
    four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    return {**found, **adapters, **(four_bits if asked["method"] == "qlora" else {})}
