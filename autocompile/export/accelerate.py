"""The file that `accelerate launch --config_file` reads."""

from __future__ import annotations

from typing import Any

import yaml

from autocompile.best_file import BestConfig
from autocompile.export.dynamo import dynamo
from autocompile.export.fields import Export, carrying, fields
from autocompile.knob_table import KnobValue

_PRECISIONS = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
_TYPES = {"none": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP"}
_CARRIED = ("parallel", "world_size", "precision", "fsdp.reshard_after_forward")


def accelerate(best: BestConfig) -> Export:
    """`accelerate launch` exports a missing ``dynamo_use_dynamic`` as false: one graph for each shape, never auto."""
    asked = fields(best)
    compiled = dynamo(asked)
    carried = {name: value for name, value in compiled.environment.items() if name.startswith("TORCHINDUCTOR_")}
    runs = {**carrying(asked, *_CARRIED), **compiled.runs}
    why = dict(compiled.why)
    if compiled.runs["scope"] != "none" and compiled.runs["dynamic"] == "auto":
        runs["dynamic"] = "false"
        why["dynamic"] = (
            "accelerate launch never leaves dynamic open: unset ACCELERATE_DYNAMO_USE_DYNAMIC in the script"
        )
    if asked["precision"] == "bf16":
        runs["precision"] = None
        why["precision"] = "load the model with dtype=torch.bfloat16; mixed_precision: bf16 would be autocast"
    text = yaml.safe_dump(_config(asked, compiled.runs), sort_keys=False)
    start = "accelerate launch --config_file FILE train.py"
    return Export(text=text, runs=runs, environment=carried, why=why, start=start)


def _config(asked: dict[str, KnobValue], runs: Any) -> dict[str, Any]:
    way = str(asked["parallel"])
    compiled = {
        "dynamo_config": {
            "dynamo_backend": str(runs["backend"]).upper(),
            "dynamo_mode": runs["mode"],
            "dynamo_use_fullgraph": runs["fullgraph"],
            "dynamo_use_dynamic": runs["dynamic"] == "true",
            "dynamo_use_regional_compilation": runs["scope"] == "layer",
        }
    }
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _TYPES.get(way, "DEEPSPEED"),
        "mixed_precision": _PRECISIONS.get(str(asked["precision"]), "no"),
        "num_machines": 1,
        "num_processes": asked["world_size"],
        **(compiled if runs["scope"] != "none" else {}),
        **_ranks(way, asked),
    }


def _ranks(way: str, asked: dict[str, KnobValue]) -> dict[str, Any]:
    if way == "fsdp":
        return {
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_reshard_after_forward": asked["fsdp.reshard_after_forward"],
            }
        }
    if way.startswith("zero"):
        steps = asked["gradient_accumulation"]
        return {"deepspeed_config": {"zero_stage": int(way[-1]), "gradient_accumulation_steps": steps}}
    return {}
