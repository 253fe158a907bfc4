"""DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from autocompile.best_file import BestConfig
from autocompile.export.fields import Export, carrying, fields
from autocompile.knob_table import KnobValue

_CARRIED = ("micro_batch", "parallel", "gradient_accumulation", "world_size", "precision")


def deepspeed(best: BestConfig) -> Export:
    """The engine's own settings; what is compiled, and how, is the script's."""
    asked = fields(best)
    runs = carrying(asked, *_CARRIED)
    why = {}
    if not str(asked["parallel"]).startswith("zero"):
        runs["parallel"] = "zero0"
        why["parallel"] = "DeepSpeed's engine does this itself; stage 0 shards nothing"
    start = f"deepspeed --num_gpus {asked['world_size']} train.py --deepspeed_config FILE"
    return Export(text=json.dumps(config(asked), indent=2) + "\n", runs=runs, why=why, start=start)


def config(asked: dict[str, KnobValue]) -> dict[str, Any]:
    """As the study's own engine was configured."""
    way = str(asked["parallel"])
    return {
        "train_micro_batch_size_per_gpu": asked["micro_batch"],
        "gradient_accumulation_steps": asked["gradient_accumulation"],
        "zero_optimization": {"stage": int(way[-1]) if way.startswith("zero") else 0},
        "bf16": {"enabled": asked["precision"] == "bf16"},
        "fp16": {"enabled": asked["precision"] == "fp16-mixed"},
        **({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if asked["precision"] == "bf16-mixed" else {}),
        "zero_allow_untested_optimizer": True,
    }
