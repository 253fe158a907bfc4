"""The file that `accelerate launch --config_file` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from autocompile.best_file import BestConfig
from autocompile.export.dynamo import dynamo
from autocompile.export.fields import Export, carrying, fields
from autocompile.export.hf_trainer import on_cpu
from autocompile.knob_table import KNOBS, KnobValue

_PRECISIONS = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
_CARRIED = ("parallel", "world_size", "precision")
_RANKS = "`accelerate config` writes that part; put this dynamo_config beside it"


def accelerate(best: BestConfig) -> Export:
    """`accelerate launch` exports a missing ``dynamo_use_dynamic`` as false: one graph for each shape, never auto."""
    asked = fields(best)
    compiled = dynamo(asked)
    carried = {name: value for name, value in compiled.environment.items() if name.startswith("TORCHINDUCTOR_")}
    runs = {**carrying(asked, *_CARRIED), **compiled.runs}
    why = dict(compiled.why)
    if asked["parallel"] != "none":
        runs["parallel"], why["parallel"] = "ddp", _RANKS
    if asked["parallel"] == "ddp":
        why["parallel"] = "Accelerate compiles the wrapped model, where the study wrapped the compiled one"
    if compiled.runs["scope"] != "none" and compiled.runs["dynamic"] == "auto":
        runs["dynamic"] = "false"
        why["dynamic"] = (
            "accelerate launch never leaves dynamic open: unset ACCELERATE_DYNAMO_USE_DYNAMIC in the script"
        )
    if asked["precision"] == "bf16":
        runs["precision"] = None
        why["precision"] = "load the model with dtype=torch.bfloat16; mixed_precision: bf16 would be autocast"
    text = yaml.safe_dump(_config(asked, compiled.runs, cpu=on_cpu(best)), sort_keys=False)
    start = "accelerate launch --config_file FILE train.py"
    return Export(text=text, runs=runs, environment=carried, why=why, start=start)


def _config(asked: Mapping[str, KnobValue], runs: Mapping[str, KnobValue], *, cpu: bool) -> dict[str, Any]:
    several = "MULTI_CPU" if cpu else "MULTI_GPU"
    compiled = {
        "dynamo_backend": str(runs.get("backend", KNOBS["backend"].default)).upper(),
        "dynamo_mode": runs["mode"],
        "dynamo_use_fullgraph": runs["fullgraph"],
        "dynamo_use_dynamic": runs["dynamic"] == "true",
        "dynamo_use_regional_compilation": runs["scope"] == "layer",
    }
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if asked["world_size"] == 1 else several,
        **({"use_cpu": True} if cpu else {}),
        "mixed_precision": _PRECISIONS.get(str(asked["precision"]), "no"),
        "num_machines": 1,
        "num_processes": asked["world_size"],
        **({"dynamo_config": compiled} if runs["scope"] != "none" else {}),
    }
