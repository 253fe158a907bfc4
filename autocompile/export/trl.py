"""The file that TRL's parser reads (`--config`): SFTConfig, ModelConfig, and the environment under ``env``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from autocompile.best_file import BestConfig
from autocompile.export.adapters import adapters, attention, told
from autocompile.export.fields import Export, fields
from autocompile.export.hf_trainer import arguments, checkpointing, launcher, of_trainer, precision
from autocompile.knob_table import KnobValue

_NAMES = {"lora.r": "lora_r", "lora.alpha": "lora_alpha", "lora.dropout": "lora_dropout"}
_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}


def trl(best: BestConfig) -> Export:
    """Packing is lost: what it puts into one row, flash attention alone keeps apart there.

    The parser sets ``env`` after torch was imported, which is too late for what inductor reads.
    """
    asked = fields(best)
    implementation, of_attention = attention(asked)
    why = {"precision": "TRL casts the adapters of a 4-bit model to bf16"} if asked["method"] == "qlora" else {}
    keys = {
        **arguments(best),
        **precision(asked),
        "gradient_checkpointing": False,  # TRL's own default is true
        **checkpointing(asked),
        "max_length": asked["sequence_length"],
        "dtype": _dtype(asked),
        "attn_implementation": implementation,
        **adapters(asked, _NAMES, use_peft=True, lora_target_modules="all-linear"),
        **(_FOUR_BITS if asked["method"] == "qlora" else {}),
    }
    runs = {**told(asked), **of_attention}
    start = f"{launcher(asked)} -m trl.scripts.sft --config FILE"
    found = of_trainer(best, keys, runs=runs, why=why, start=start)
    return _with_environment(found, keys)


def _dtype(asked: Mapping[str, KnobValue]) -> str:
    """Of the weights: what is frozen is in the dtype of the arithmetic, what autocast trains in fp32."""
    if asked["precision"] == "fp32" or (asked["method"] == "full" and asked["precision"] != "bf16"):
        return "float32"
    return "float16" if asked["precision"] == "fp16-mixed" else "bfloat16"


def _with_environment(found: Export, keys: Mapping[str, Any]) -> Export:
    inside = {name: value for name, value in found.environment.items() if not name.startswith("TORCHINDUCTOR_")}
    outside = {name: value for name, value in found.environment.items() if name not in inside}
    text = yaml.safe_dump({**keys, **({"env": inside} if inside else {})}, sort_keys=False)
    return replace(found, text=text, environment=outside)
