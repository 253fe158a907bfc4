"""Arguments of Hugging Face's Trainer, as its HfArgumentParser reads them (`parse_yaml_file`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from autocompile.best_file import BestConfig
from autocompile.export.dynamo import dynamo
from autocompile.export.fields import Export, carrying, fields, ranks_left
from autocompile.knob_table import KnobValue

_CARRIED = (
    *("optimizer", "micro_batch", "gradient_checkpointing", "gradient_accumulation", "float32_matmul_precision"),
    *("precision", "parallel", "world_size", "ddp.bucket_cap_mb"),
)


def hf_trainer(best: BestConfig) -> Export:
    """Compile is in the environment alone: ``torch_compile`` would compile the whole model, and turn TF32 on."""
    asked = fields(best)
    why = {}
    runs: dict[str, KnobValue | None] = {}
    if asked["precision"] == "bf16":
        runs["precision"] = None
        why["precision"] = "load the model with dtype=torch.bfloat16; bf16: true would be mixed precision"
    keys = {**arguments(best), **precision(asked), **checkpointing(asked)}
    return of_trainer(best, keys, runs=runs, why=why, start=f"{launcher(asked)} train.py")


def arguments(best: BestConfig) -> dict[str, Any]:
    """Those that all who are built on Trainer take by these names."""
    asked = fields(best)
    return {
        "per_device_train_batch_size": asked["micro_batch"],
        "gradient_accumulation_steps": asked["gradient_accumulation"],
        "optim": asked["optimizer"],
        **({"use_cpu": True} if on_cpu(best) else {"tf32": asked["float32_matmul_precision"] == "high"}),
        **({"ddp_bucket_cap_mb": asked["ddp.bucket_cap_mb"]} if asked["parallel"] == "ddp" else {}),
    }


def precision(asked: Mapping[str, KnobValue]) -> dict[str, bool]:
    return {"bf16": asked["precision"] == "bf16-mixed", "fp16": asked["precision"] == "fp16-mixed"}


def checkpointing(asked: Mapping[str, KnobValue]) -> dict[str, Any]:
    if not asked["gradient_checkpointing"]:
        return {}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def of_trainer(
    best: BestConfig,
    keys: Mapping[str, Any],
    *,
    runs: Mapping[str, KnobValue | None],
    why: Mapping[str, str],
    start: str,
) -> Export:
    """What runs where these keys and the environment of compile are given; ``runs`` and ``why`` are of who is built on
    Trainer and carries more fields, or fewer, than its arguments do."""
    asked = fields(best)
    compiled = dynamo(asked)
    ranks, of_ranks = ranks_left(asked)
    by_default = {"padding": "longest", **({"float32_matmul_precision": "highest"} if on_cpu(best) else {})}
    return Export(
        text=yaml.safe_dump(dict(keys), sort_keys=False),
        runs={**carrying(asked, *_CARRIED), **compiled.runs, **by_default, **ranks, **runs},
        environment=compiled.environment,
        why={**compiled.why, **of_ranks, **why},
        about="keys for a file of your own, which names the model, the data and where to write",
        start=start,
    )


def launcher(asked: Mapping[str, KnobValue]) -> str:
    """Trainer would use all GPUs that it sees."""
    world = int(asked["world_size"])
    return f"torchrun --nproc_per_node {world}" if world > 1 else "CUDA_VISIBLE_DEVICES=0 python"


def on_cpu(best: BestConfig) -> bool:
    return best.workload.spec.device == "cpu"
