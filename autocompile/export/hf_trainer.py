"""Arguments of Hugging Face's Trainer, as its HfArgumentParser reads them (`parse_yaml_file`)."""

from __future__ import annotations

from typing import Any

import yaml

from autocompile.best_file import BestConfig
from autocompile.export.deepspeed import SETTINGS, config
from autocompile.export.dynamo import dynamo
from autocompile.export.fields import Export, carrying, fields
from autocompile.knob_table import KnobValue

_CARRIED = (
    *("optimizer", "micro_batch", "gradient_checkpointing", "gradient_accumulation", "float32_matmul_precision"),
    *("precision", "parallel", "world_size", "ddp.bucket_cap_mb", "fsdp.reshard_after_forward"),
    *SETTINGS,
)


def hf_trainer(best: BestConfig) -> Export:
    """Compile is in the environment alone: ``torch_compile`` would compile the whole model, and turn TF32 on."""
    return of_trainer(best, arguments(best))


def arguments(best: BestConfig) -> dict[str, Any]:
    """Those of TrainingArguments, which TRL and LLaMA-Factory take too."""
    asked = fields(best)
    on_cpu = best.workload.spec.device == "cpu"
    return {
        "per_device_train_batch_size": asked["micro_batch"],
        "gradient_accumulation_steps": asked["gradient_accumulation"],
        "bf16": asked["precision"] == "bf16-mixed",
        "fp16": asked["precision"] == "fp16-mixed",
        **({"use_cpu": True} if on_cpu else {"tf32": asked["float32_matmul_precision"] == "high"}),
        "optim": asked["optimizer"],
        **_checkpointing(asked),
        **_ranks(best, asked),
    }


def of_trainer(best: BestConfig, keys: dict[str, Any], *carried: str, start: str = "train.py") -> Export:
    """What runs where these keys and this environment are given to Trainer, or to who is built on it and carries more
    fields than its arguments do."""
    asked = fields(best)
    compiled = dynamo(asked)
    runs = {**carrying(asked, *_CARRIED), **compiled.runs, "padding": "longest"}  # by its default collators
    why = dict(compiled.why)
    if asked["precision"] == "bf16":
        runs["precision"] = None
        why["precision"] = "load the model with dtype=torch.bfloat16; bf16: true would be mixed precision"
    if best.workload.spec.device == "cpu":
        runs["float32_matmul_precision"] = "highest"
    runs.update({name: asked[name] for name in carried if name in asked})
    world = int(asked["world_size"])
    launch = f"torchrun --nproc_per_node {world}" if world > 1 else "CUDA_VISIBLE_DEVICES=0 python"
    return Export(
        text=yaml.safe_dump(keys, sort_keys=False),
        runs=runs,
        environment=compiled.environment,
        why=why,
        start=f"{launch} {start}",
    )


def _checkpointing(asked: dict[str, KnobValue]) -> dict[str, Any]:
    if not asked["gradient_checkpointing"]:
        return {}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def _ranks(best: BestConfig, asked: dict[str, KnobValue]) -> dict[str, Any]:
    way = str(asked["parallel"])
    if way == "ddp":
        return {"ddp_bucket_cap_mb": asked["ddp.bucket_cap_mb"]}
    if way == "fsdp":
        return {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": asked["fsdp.reshard_after_forward"]}}
    if way.startswith("zero"):
        return {"deepspeed": config(best)}
    return {}
