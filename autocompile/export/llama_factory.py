"""The YAML of LLaMA-Factory (`llamafactory-cli train`), whose keys are Trainer's and its own."""

from __future__ import annotations

from autocompile.best_file import BestConfig
from autocompile.export.adapters import adapters, told
from autocompile.export.fields import Export, fields
from autocompile.export.hf_trainer import arguments, of_trainer, precision

_NAMES = {"lora.r": "lora_rank", "lora.alpha": "lora_alpha", "lora.dropout": "lora_dropout"}
_FOUR_BITS = {"quantization_bit": 4, "quantization_type": "nf4", "double_quantization": True}


def llama_factory(best: BestConfig) -> Export:
    """It checkpoints unless told otherwise, reentrant by default, and packs without keeping sequences apart."""
    asked = fields(best)
    eager = asked["sdpa"] == "eager"
    keys = {
        **arguments(best),
        **precision(asked),
        "pure_bf16": asked["precision"] == "bf16",
        "disable_gradient_checkpointing": not asked["gradient_checkpointing"],
        "use_reentrant_gc": False,
        "cutoff_len": asked["sequence_length"],
        "flash_attn": "disabled" if eager else "sdpa",
        "finetuning_type": "full" if asked["method"] == "full" else "lora",
        **adapters(asked, _NAMES, lora_target="all"),
        **(_FOUR_BITS if asked["method"] == "qlora" else {}),
    }
    runs = {**told(asked), "sdpa": "eager" if eager else "auto"}
    world = asked["world_size"]
    ranks = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={world}" if world != 1 else "CUDA_VISIBLE_DEVICES=0"
    return of_trainer(best, keys, runs=runs, why={}, start=f"{ranks} llamafactory-cli train FILE")
