"""The YAML of LLaMA-Factory (`llamafactory-cli train`), whose keys are Trainer's and its own."""

from __future__ import annotations

from typing import Any

from autocompile.best_file import BestConfig
from autocompile.export.fields import Export, fields
from autocompile.export.hf_trainer import arguments, of_trainer
from autocompile.knob_table import KnobValue

_CARRIED = ("sequence_length", "method", "precision", "lora.r", "lora.alpha", "lora.dropout")


def llama_factory(best: BestConfig) -> Export:
    """It checkpoints unless told otherwise, reentrant by default."""
    asked = fields(best)
    carried = [*_CARRIED]
    if asked["padding"] == "packed":
        carried.append("padding")
    if asked["sdpa"] == "eager":
        carried.append("sdpa")
    theirs = {name: value for name, value in arguments(best).items() if not name.startswith("gradient_checkpointing")}
    return of_trainer(best, {**theirs, **_own(asked)}, *carried, start="-m llamafactory.launcher train FILE")


def _own(asked: dict[str, KnobValue]) -> dict[str, Any]:
    found = {
        "finetuning_type": "full" if asked["method"] == "full" else "lora",
        "cutoff_len": asked["sequence_length"],
        "packing": asked["padding"] == "packed",
        "pure_bf16": asked["precision"] == "bf16",
        "flash_attn": "disabled" if asked["sdpa"] == "eager" else "sdpa",
        "disable_gradient_checkpointing": not asked["gradient_checkpointing"],
        "use_reentrant_gc": False,
    }
    if asked["method"] == "full":
        return found
    adapters = {
        "lora_rank": asked["lora.r"],
        "lora_alpha": asked["lora.alpha"],
        "lora_dropout": asked["lora.dropout"],
        "lora_target": "all",
    }
    four_bits = {"quantization_bit": 4, "quantization_type": "nf4", "double_quantization": True}
    return {**found, **adapters, **(four_bits if asked["method"] == "qlora" else {})}
