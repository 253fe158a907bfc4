"""DeepSpeed's JSON."""

from __future__ import annotations

import json

from autocompile.best_file import BestConfig
from autocompile.deepspeed_settings import PLACES, engine_config, in_sections
from autocompile.export.fields import Export, carrying, fields
from autocompile.knob_table import KNOBS

_SETTINGS = tuple(name for name in PLACES if not KNOBS[name].compiles)
_CARRIED = ("micro_batch", "parallel", "gradient_accumulation", "world_size", "precision", *_SETTINGS)


def deepspeed(best: BestConfig) -> Export:
    """As the study's own engine was configured; what is compiled, and how, is the script's."""
    asked = fields(best)
    runs = carrying(asked, *_CARRIED)
    why = {"scope": "compile in your script, before deepspeed.initialize"} if asked["scope"] != "none" else {}
    if not str(asked["parallel"]).startswith("zero"):
        runs["parallel"] = "zero0"
        why["parallel"] = "DeepSpeed's engine does this itself; stage 0 shards nothing"
    if asked["precision"] == "fp16-mixed":
        runs["precision"] = "fp32"
        why["precision"] = "DeepSpeed's own fp16 scales in another way than torch's"
    config = engine_config(
        best.workload.spec.deepspeed_config or {},
        in_sections({name: asked[name] for name in _SETTINGS if name in asked}),
        stage=int(str(runs["parallel"])[-1]),
        precision=str(asked["precision"]),
        n_micro_batches=best.workload.gradient_accumulation,
    )
    user = best.workload.spec.deepspeed_config or {}
    theirs: dict[str, object] = {
        name: user[name] for name in ("optimizer", "scheduler") if name in user
    }  # the study had its own
    config = {**theirs, **config, "train_micro_batch_size_per_gpu": asked["micro_batch"]}
    start = f"deepspeed --num_gpus {asked['world_size']} train.py --deepspeed_config FILE"
    return Export(text=json.dumps(config, indent=2) + "\n", runs=runs, suffix=".json", why=why, start=start)
