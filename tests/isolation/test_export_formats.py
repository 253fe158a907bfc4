"""Exports in the hands of those who read them: each library's own parser, and the keys that two others document."""

from __future__ import annotations

import json
import os
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch._inductor.graph import GraphLowering

from autocompile.best_file import BestConfig
from autocompile.export import exported
from autocompile.export.document import documents
from autocompile.knobs import Setup, apply_config
from autocompile.slice.telemetry import code_hash
from autocompile.spec import Method, Precision, WorkloadSpec
from autocompile.tuner.folders import copy_seed
from autocompile.workloads.job import Context, Job, prepare, trainable
from tests.unit.test_export import PRECISIONS, best

# Of the schemas of Axolotl 0.19.0 and of the arguments of LLaMA-Factory 0.9.5, which bring pins of their own.
AXOLOTL = {
    *("micro_batch_size", "gradient_accumulation_steps", "optimizer", "tf32", "bf16", "fp16"),
    *("sequence_len", "sample_packing", "pad_to_sequence_len", "attn_implementation", "adapter", "load_in_4bit"),
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "ddp_bucket_cap_mb"),
}
LLAMA_FACTORY = {
    *("finetuning_type", "cutoff_len", "pure_bf16", "flash_attn", "disable_gradient_checkpointing"),
    *("use_reentrant_gc", "lora_rank", "lora_alpha", "lora_dropout", "lora_target"),
    *("quantization_bit", "quantization_type", "double_quantization"),
}
COMPILED = {"scope": "layer", "mode": "max-autotune-no-cudagraphs", "fullgraph": True, "gradient_checkpointing": True}
WAYS = ("none", "ddp", "fsdp")


def on_a_cpu(**more: Any) -> BestConfig:
    return best(COMPILED, device="cpu", **more)


def written(one: BestConfig, to: str, folder: Path) -> Path:
    made = exported(one, to)
    path = folder / f"train{made.suffix}"
    for where, text in documents(one, made, path, []).items():
        where.write_text(text)
    return path


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", WAYS)
def test_transformers_reads_its_arguments(tmp_path: Path, precision: str, way: str) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    path = written(on_a_cpu(precision=precision, way=way), "hf-trainer", tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)  # versions before know no other
        (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    assert (arguments.bf16, arguments.fp16) == (precision == "bf16-mixed", precision == "fp16-mixed")
    assert arguments.gradient_checkpointing and arguments.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert arguments.ddp_bucket_cap_mb == (25 if way == "ddp" else None)
    assert not arguments.torch_compile


def test_accelerate_compiles_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import TorchDynamoPlugin

    for name, value in exported(on_a_cpu(), "hf-trainer").environment.items():
        monkeypatch.setenv(name, value)
    plugin = TorchDynamoPlugin()
    assert plugin.use_regional_compilation and plugin.dynamic is None
    assert (plugin.backend.value, plugin.mode, plugin.fullgraph) == ("INDUCTOR", "max-autotune-no-cudagraphs", True)


@pytest.mark.parametrize("way", WAYS)
def test_accelerate_reads_its_file(tmp_path: Path, way: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(written(on_a_cpu(way=way, precision="bf16-mixed"), "accelerate", tmp_path)))
    assert found.dynamo_config["dynamo_mode"] == "max-autotune-no-cudagraphs"
    assert (found.num_processes, found.mixed_precision, found.use_cpu) == (1 if way == "none" else 2, "bf16", True)


def test_deepspeed_reads_its_json(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    one = on_a_cpu(way="zero2", global_batch=16)
    path = written(one, "deepspeed", tmp_path)
    found = DeepSpeedConfig(json.loads(path.read_text()))
    assert (found.zero_config.stage, found.bfloat16_config.enabled) == (2, True)
    assert found.gradient_accumulation_steps == one.workload.gradient_accumulation


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_trl_reads_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    from trl import ModelConfig, SFTConfig, TrlParser

    monkeypatch.setattr(os, "environ", dict(os.environ))  # which the parser changes
    path = written(on_a_cpu(method=method), "trl", tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)
        training, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config(["--config", str(path)])
    assert (training.bf16, model.dtype, model.use_peft) == (False, "bfloat16", method != "full")
    assert model.load_in_4bit == (method == "qlora")
    assert training.max_length == 1024
    assert os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == "true"


@pytest.mark.parametrize(("way", "method"), [("none", "qlora"), ("ddp", "lora"), ("fsdp", "full"), ("zero2", "qlora")])
def test_other_trainers_are_given_keys_that_they_document(way: str, method: str) -> None:
    from transformers import TrainingArguments

    one = best(COMPILED, way=way, method=method)
    assert set(yaml.safe_load(exported(one, "axolotl").text)) <= AXOLOTL
    theirs = set(yaml.safe_load(exported(one, "llama-factory").text))
    assert theirs <= LLAMA_FACTORY | set(TrainingArguments.__dataclass_fields__)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.parametrize("scope", ["layer", "mlp", "attention"])
def test_the_piece_of_python_compiles_what_the_study_did(
    tmp_path: Path, inductor_seed: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    """The same graphs: the hashes of inductor's code are equal."""
    copy_seed(inductor_seed, tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    knobs = {"scope": scope, "fullgraph": True, "dynamic": "false", "coordinate_descent_tuning": scope == "mlp"}
    path = tmp_path / "configured.py"
    path.write_text(exported(best(knobs, method="full", precision="fp32", device="cpu"), "python").text)
    module = runpy.run_path(str(path))
    job = tiny()
    module["configure"](job.model)
    own = trained(job, module["optimizer"](trainable(job.model), 1e-4), monkeypatch)
    assert own == trained(*applied(knobs), monkeypatch)
    assert own


def tiny() -> Job:
    workload = WorkloadSpec(model="tiny-llama", method=Method.FULL, precision=Precision.FP32, sequence_length=32)
    context = Context(
        device=torch.device("cpu"), dtype=torch.float32, micro_batch=2, sequence_length=32, depth=2, seed=0
    )
    return prepare(context, workload)


def applied(knobs: dict[str, Any]) -> tuple[Job, torch.optim.Optimizer]:
    job = tiny()
    apply_config(Setup(model=job.model, regions=job.regions), knobs)
    return job, job.optimizer(trainable(job.model))


def trained(job: Job, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hashes of all code that inductor made in two steps."""
    seen: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(lambda code: seen.append(code_hash(code))))
    torch._dynamo.reset()
    batches = job.batches()
    for _ in range(2):
        job.train_step(job.model, [next(batches)], optimizer)
    return sorted(seen)
