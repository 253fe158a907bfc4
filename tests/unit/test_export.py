"""Exports: whatever a config asks for is in the file, or in the list of what the file loses."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from autocompile.best_file import BestConfig, BestWorkload, Evidence, Expected, MadeFor, load
from autocompile.errors import UserError
from autocompile.export import FORMATS, Export, exported, fields, lossy
from autocompile.export.document import documents
from autocompile.knob_table import KNOBS, WAYS_TO_TRAIN
from autocompile.search.canonical import settings
from autocompile.space import choose, load_space, space_folder
from autocompile.spec import Method, WorkloadSpec, gradient_accumulation, traits
from tests.unit.search_cases import CPU, CUDA, config, facts, spec

SPACES = sorted(path.stem for path in space_folder().glob("*.yaml"))
PRECISIONS = ("bf16", "bf16-mixed", "fp16-mixed", "fp32")


def best(knobs, *, way="none", method="lora", precision="bf16", device="cuda", **workload):
    ranks = 1 if way == "none" else 2
    asked = WorkloadSpec(
        model="llama2-7b", parallel=way, gpus_per_trial=ranks, device=device, method=Method(method), **workload
    )
    settled = config(**{**knobs, "parallel": way})
    return BestConfig(
        study="some",
        result="win",
        config=settled,
        expected=Expected(
            tokens_per_second=(2, 1, 3), step_seconds=(2, 1, 3), peak_memory_bytes=1, compile_seconds=1, graphs=1
        ),
        evidence=Evidence(speedup=2, speedup_vs_best_eager=2, confirmed_by=(1, 2), break_even_steps=1),
        made_for=MadeFor(
            gpu="NVIDIA H200",
            torch="2.13",
            triton="3.7",
            method=method,
            model_type="llama",
            parallel=way,
            world_size=ranks,
            sequence_length=asked.sequence_length,
        ),
        workload=BestWorkload(
            micro_batch=int(settled["micro_batch"]),
            gradient_accumulation=gradient_accumulation(asked, settled),
            precision=precision,
            spec=asked,
        ),
    )


def some_configs(n):
    """Of every shipped space, for GPUs and CPUs, with every way to train, method and precision."""
    rng = random.Random(0)
    for space in SPACES:
        for device in (CUDA, CPU):
            for _ in range(n):
                way = rng.choice(WAYS_TO_TRAIN)
                ranks = {} if way == "none" else {"parallel": way, "gpus_per_trial": 2}
                lengths = rng.choice([None, "uniform:16-64"])
                study = spec(space=load_space(space), workload={**ranks, "lengths": lengths})
                pick = lambda name, index, parameter: rng.choice(parameter.values())  # noqa: E731
                found = choose(study.space, traits(study, facts(device)), settings(study, facts(device)), pick)
                method = rng.choice(["full", "lora"] if way in ("fsdp", "zero3") else ["full", "lora", "qlora"])
                yield best(
                    found,
                    way=way,
                    method=method,
                    precision=rng.choice(PRECISIONS[:2] if way.startswith("zero") else PRECISIONS),
                    device=device.type,
                    global_batch=rng.choice([None, int(found["micro_batch"]) * 2 * (2 if ranks else 1)]),
                )


CONFIGS = list(some_configs(25))


@pytest.mark.parametrize("to", FORMATS)
def test_each_field_is_in_the_export_or_in_its_list_of_losses(to):
    for one in CONFIGS:
        made = exported(one, to)
        said, lost = READERS[to](made), {loss.field: loss.instead for loss in lossy(one, made)}
        for name, wanted in fields(one).items():
            if name in lost:
                assert lost[name] is None or said.get(name, lost[name]) == lost[name], (to, name, one.config)
            else:
                assert said.get(name, _unset(to, name)) == wanted, (to, name, one.config)


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_lost_stands_in_the_files(to, tmp_path):
    one = best({"scope": "*.q_proj", "cache_size_limit": 64, "sdpa": "flash", "dynamic": "marked"})
    made = exported(one, to)
    found = documents(one, made, tmp_path / f"train{made.suffix}", [])
    text = "".join(found.values())
    for loss in lossy(one, exported(one, to)):
        assert re.search(rf"^#   {re.escape(loss.field)}=", text, re.M), loss
    assert {path.parent for path in found} == {tmp_path}


def test_a_name_that_another_reader_would_take_is_refused(tmp_path):
    one = best({})
    with pytest.raises(UserError, match=r"expected a name that ends with \.json"):
        documents(one, exported(one, "deepspeed"), tmp_path / "ds.yaml", [])


@pytest.mark.parametrize("to", ["hf-trainer", "trl", "llama-factory", "axolotl"])
@pytest.mark.parametrize("way", ["fsdp", "zero2"])
def test_sharding_is_left_to_the_trainers_own_settings(to, way):
    one = best({"scope": "layer"}, way=way, method="full")
    left = {loss.field for loss in lossy(one, exported(one, to)) if loss.instead is None}
    assert "parallel" in left
    assert not {"fsdp", "fsdp_config", "deepspeed"} & set(yaml.safe_load(exported(one, to).text))


def test_the_piece_of_python_leaves_no_compile_to_deepspeeds_engine():
    one = best({"scope": "model", "deepspeed.compile": True}, way="zero2", method="full")
    assert "deepspeed.compile" in {loss.field for loss in lossy(one, exported(one, "python"))}


def test_an_unknown_format_is_one_line():
    with pytest.raises(UserError, match="expected one of hf-trainer"):
        exported(best({}), "tlr")


def _unset(to, name):
    """What a field that the file does not set is there: torch's own value, where nobody else sets it."""
    return KNOBS[name].default if name in KNOBS else None


def of_dynamo(environment):
    prefix = "ACCELERATE_DYNAMO_"
    inductor = {
        "coordinate_descent_tuning": lambda text: text == "1",
        "shape_padding": lambda text: text == "1",
        "max_autotune_gemm_backends": str,
    }
    found = {
        name: read(environment[f"TORCHINDUCTOR_{name.upper()}"])
        for name, read in inductor.items()
        if f"TORCHINDUCTOR_{name.upper()}" in environment
    }
    if f"{prefix}BACKEND" not in environment:
        return {"scope": "none"}
    return {
        **found,
        "scope": "layer" if environment[f"{prefix}USE_REGIONAL_COMPILATION"] == "true" else "model",
        "backend": environment[f"{prefix}BACKEND"].lower(),
        "mode": environment[f"{prefix}MODE"],
        "fullgraph": environment[f"{prefix}USE_FULLGRAPH"] == "true",
        "dynamic": environment.get(f"{prefix}USE_DYNAMIC", "auto"),
    }


def of_deepspeed(data):
    zero = data["zero_optimization"]
    settings = ("overlap_comm", "reduce_bucket_size", "allgather_bucket_size")
    mixed = data["torch_autocast"]["enabled"]
    return {
        "precision": "bf16-mixed" if mixed else "bf16" if data["bf16"]["enabled"] else "fp32",
        "parallel": f"zero{zero['stage']}",
        **{f"deepspeed.{name}": zero[name] for name in settings if name in zero},
    }


def of_arguments(keys, *, batch="per_device_train_batch_size", optimizer="optim"):
    """Of transformers' TrainingArguments, under the names that some give them."""
    way = "ddp" if "ddp_bucket_cap_mb" in keys else "none"
    precision = "bf16-mixed" if keys["bf16"] else "fp16-mixed" if keys["fp16"] else "fp32"
    found = {
        "micro_batch": keys[batch],
        "gradient_accumulation": keys["gradient_accumulation_steps"],
        "optimizer": keys[optimizer],
        "precision": precision,
        "gradient_checkpointing": keys.get("gradient_checkpointing", False),
        "float32_matmul_precision": "high" if keys.get("tf32") else "highest",
        "padding": "longest",
        "parallel": way,
    }
    return {**found, **({"ddp.bucket_cap_mb": keys["ddp_bucket_cap_mb"]} if way == "ddp" else {})}


def of_launch(made):
    counted = re.search(r"(--nproc_per_node |NPROC_PER_NODE=)(\d+)", made.start)
    return {"world_size": int(counted[2]) if counted else 1}


def hf_trainer(made: Export):
    return {**of_arguments(yaml.safe_load(made.text)), **of_dynamo(made.environment), **of_launch(made)}


def accelerate(made: Export):
    data = yaml.safe_load(made.text)
    found = {
        "parallel": {"NO": "none", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}[data["distributed_type"]],
        "world_size": data["num_processes"],
        "precision": {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "no": "fp32"}[data["mixed_precision"]],
    }
    if "dynamo_config" not in data:
        return {**found, "scope": "none"}
    words = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in data["dynamo_config"].items()
    }
    environment = {f"ACCELERATE_{name.upper()}": value for name, value in words.items()}
    return {**found, **of_dynamo({**made.environment, **environment})}


def deepspeed(made: Export):
    data = json.loads(made.text)
    counted = re.search(r"--num_gpus (\d+)", made.start)
    return {
        **of_deepspeed(data),
        "micro_batch": data["train_micro_batch_size_per_gpu"],
        "gradient_accumulation": data["gradient_accumulation_steps"],
        "world_size": int(counted[1]),
    }


def of_adapters(keys, *, r, alpha, dropout, quantised):
    method = "full" if r not in keys else "qlora" if keys.get(quantised) else "lora"
    everywhere = keys.get("lora_target_linear") or "all" in (keys.get("lora_target"), keys.get("lora_target_modules"))
    targets = keys.get("lora_target_modules", "all-linear" if everywhere else None)
    numbers = {"lora.r": keys.get(r), "lora.alpha": keys.get(alpha), "lora.dropout": keys.get(dropout)}
    adapters = {**numbers, "lora.targets": targets}
    return {"method": method, **(adapters if method != "full" else {})}


def trl(made: Export):
    keys = yaml.safe_load(made.text)
    names = {"r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "quantised": "load_in_4bit"}
    found = {
        **of_arguments(keys),
        **of_adapters(keys, **names),
        **of_dynamo({**keys.get("env", {}), **made.environment}),
        **of_launch(made),
        "sequence_length": keys["max_length"],
        "sdpa": {"sdpa": "auto", "flex_attention": "flex"}.get(
            keys["attn_implementation"], keys["attn_implementation"]
        ),
    }
    if found["precision"] == "fp32" and keys["dtype"] == "bfloat16":
        found["precision"] = "bf16"
    return found


def llama_factory(made: Export):
    keys = yaml.safe_load(made.text)
    names = {"r": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "quantised": "quantization_bit"}
    found = {
        **of_arguments(keys),
        **of_adapters(keys, **names),
        **of_dynamo(made.environment),
        **of_launch(made),
        "sequence_length": keys["cutoff_len"],
        "sdpa": {"disabled": "eager", "sdpa": "auto"}[keys["flash_attn"]],
        "gradient_checkpointing": not keys["disable_gradient_checkpointing"],
    }
    return {**found, **({"precision": "bf16"} if keys["pure_bf16"] else {})}


def axolotl(made: Export):
    keys = yaml.safe_load(made.text)
    names = {"r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "quantised": "load_in_4bit"}
    return {
        **of_arguments(keys, batch="micro_batch_size", optimizer="optimizer"),
        **of_adapters(keys, **names),
        **of_dynamo(made.environment),
        **of_launch(made),
        "sequence_length": keys["sequence_len"],
        "padding": "packed" if keys["sample_packing"] else "fixed" if keys["pad_to_sequence_len"] else "longest",
        "sdpa": {"sdpa": "auto", "flex_attention": "flex"}.get(
            keys["attn_implementation"], keys["attn_implementation"]
        ),
    }


def python(made: Export):
    """Its constants by name, and of its statements what they say."""
    text = made.text
    constants = {name.lower(): value for name, value in re.findall(r"^([A-Z_0-9]+) = (.+)$", text, re.M)}
    found = {
        name: yaml.safe_load(constants[name.replace(".", "_")])
        for name in (*KNOBS, "world_size", "gradient_accumulation", "precision", "sequence_length", "method")
        if name.replace(".", "_") in constants
    }
    for name in ("r", "alpha", "dropout", "targets"):
        if f"lora_{name}" in constants:
            found[f"lora.{name}"] = yaml.safe_load(constants[f"lora_{name}"])
    return {**found, **_statements(text)}


def _statements(text):
    kernels = {"flash": "flash", "mem_efficient": "efficient", "cudnn": "cudnn", "math": "math"}
    forced = re.search(r"enable_(\w+)_sdp\(True\)", text)
    other = re.search(r'set_attn_implementation\("(\w+)"\)', text)
    other_name = other and {"flex_attention": "flex"}.get(other[1], other[1])
    eight_bit = "paged_adamw_8bit" if "Paged" in text else "adamw_8bit"
    torch_s = "adamw_torch_fused" if "fused=True" in text else "adamw_torch"
    found = {
        "float32_matmul_precision": re.search(r'set_float32_matmul_precision\("(\w+)"\)', text)[1],
        "sdpa": kernels[forced[1]] if forced else other_name or "auto",
        "channels_last": "channels_last" in text,
        "gradient_checkpointing": "gradient_checkpointing_enable" in text,
        "input_gradients": "enable_input_require_grads" in text,
        "optimizer": eight_bit if "8bit" in text else torch_s,
        "scope": "none",
    }
    if "module.compile" not in text:
        return found
    loop = re.search(r"for module in (.+):$", text, re.M)[1]
    part = next((scope for scope in ("ATTENTION", "MLP") if scope in loop), "layers" if "layers" in loop else "model")
    budget = re.search(r"activation_memory_budget = (.+)", text)
    arguments = re.search(r"module\.compile\((.+)\)$", text, re.M)[1]
    options = re.search(r"\*\*(\{'.+?\})", arguments)
    mode = re.search(r'mode(?:=|_options\()"([\w-]+)"', arguments)
    return {
        **found,
        **(yaml.safe_load(options[1].replace("True", "true").replace("False", "false")) if options else {}),
        "scope": {"ATTENTION": "attention", "MLP": "mlp", "layers": "layer", "model": "model"}[part],
        "cache_size_limit": int(re.search(r"recompile_limit = (\d+)", text)[1]),
        "activation_memory_budget": float(budget[1]) if budget else 1.0,
        "backend": re.search(r'backend="(\w+)"', arguments)[1],
        "mode": mode[1] if mode else "default",
        "fullgraph": "fullgraph=True" in arguments,
        "dynamic": {"None": "auto", "True": "true", "False": "false"}[re.search(r"dynamic=(\w+)", arguments)[1]],
    }


def env(made: Export):
    assigned = re.findall(r"^export (\w+)=(.+)$", made.text, re.M)
    return of_dynamo(dict(assigned))


READERS = {
    "hf-trainer": hf_trainer,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "axolotl": axolotl,
    "llama-factory": llama_factory,
    "trl": trl,
    "python": python,
    "env": env,
}


def test_the_committed_best_files_export(tmp_path):
    paths = sorted((Path(__file__).parents[2] / "studies").glob("*/best.yaml"))
    assert paths
    for path in paths:
        assert all(exported(load(path), to).text for to in FORMATS)
