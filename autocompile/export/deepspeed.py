"""DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from autocompile.best_file import BestConfig
from autocompile.deepspeed_settings import PLACES, fixed_part
from autocompile.export.fields import Export, carrying, fields
from autocompile.knob_table import KNOBS

SETTINGS = tuple(name for name in PLACES if not KNOBS[name].compiles)
_CARRIED = ("micro_batch", "parallel", "gradient_accumulation", "world_size", "precision", *SETTINGS)


def deepspeed(best: BestConfig) -> Export:
    """The engine's own settings; what is compiled, and how, is the script's."""
    asked = fields(best)
    runs = carrying(asked, *_CARRIED)
    why = {}
    if not str(asked["parallel"]).startswith("zero"):
        runs["parallel"] = "zero0"
        why["parallel"] = "DeepSpeed's engine does this itself; stage 0 shards nothing"
    start = f"deepspeed --num_gpus {asked['world_size']} train.py --deepspeed_config FILE"
    return Export(text=json.dumps(config(best), indent=2) + "\n", runs=runs, why=why, start=start)


def config(best: BestConfig) -> dict[str, Any]:
    """As the study's own engine was configured, over what the user's file fixed."""
    asked = fields(best)
    way = str(asked["parallel"])
    found = {
        **fixed_part(best.workload.spec.deepspeed_config or {}),
        "train_micro_batch_size_per_gpu": asked["micro_batch"],
        "gradient_accumulation_steps": asked["gradient_accumulation"],
        "bf16": {"enabled": asked["precision"] == "bf16"},
        "fp16": {"enabled": asked["precision"] == "fp16-mixed"},
        "torch_autocast": {"enabled": asked["precision"] == "bf16-mixed", "dtype": "bfloat16"},
        "zero_allow_untested_optimizer": True,
    }
    found["zero_optimization"] = {
        **found.get("zero_optimization", {}),
        "stage": int(way[-1]) if way[:4] == "zero" else 0,
    }
    for name in SETTINGS:
        if asked.get(name, KNOBS[name].default) != KNOBS[name].default:
            section, key = PLACES[name]
            found[section] = {**found.get(section, {}), key: asked[name]}
    return found
