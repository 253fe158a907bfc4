"""Knobs of what is wrapped around a model that trains on several GPUs; who wraps it passes them on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from autocompile.deepspeed_settings import PLACES
from autocompile.knob_table import family
from autocompile.knobs.setup import Setup, knob


@knob("parallel")
def parallel(setup: Setup, way: str) -> Setup:
    """How the ranks train together. Who wraps the model is told by ``setup.parallel``, which is this value."""
    how = {
        "none": "train on one GPU",
        "ddp": "wrap the model in DistributedDataParallel",
        "fsdp": "fully_shard each layer",
    }
    what = how.get(way, f"train through deepspeed.initialize with ZeRO stage {way[-1]}")
    return replace(setup, yours={**setup.yours, "parallel": what})


def _argument(name: str, function: str) -> None:
    """An argument of this name of that function, which a script has to pass itself."""
    owner, _, argument = name.partition(".")

    def passed_on(setup: Setup, value: Any) -> Setup:
        if setup.parallel != owner:
            return setup.did(name, f"of {owner} alone")
        options = {**setup.wrapper, argument: value}
        return replace(setup, wrapper=options, yours={**setup.yours, name: f"{function}(..., {argument}={value})"})

    knob(name)(passed_on)


_argument("ddp.bucket_cap_mb", "DistributedDataParallel")
_argument("ddp.gradient_as_bucket_view", "DistributedDataParallel")
_argument("fsdp.reshard_after_forward", "fully_shard")


def _dtype(name: str) -> None:
    """A field of the policy that every `fully_shard` gets."""
    _, _, field = name.partition(".")

    def passed_on(setup: Setup, value: str) -> Setup:
        if setup.parallel != "fsdp" or value == "as_is":
            return setup.did(name, "of fsdp alone" if setup.parallel != "fsdp" else "as it is")
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[value]
        policy = replace(setup.wrapper.get("mp_policy", MixedPrecisionPolicy()), **{field: dtype})
        line = f"fully_shard(..., mp_policy=MixedPrecisionPolicy({field}={dtype})), the root's too"
        return replace(setup, wrapper={**setup.wrapper, "mp_policy": policy}, yours={**setup.yours, name: line})

    knob(name)(passed_on)


_dtype("fsdp.param_dtype")
_dtype("fsdp.reduce_dtype")


@knob("ddp.optimize_ddp")
def optimize_ddp(setup: Setup, on: bool) -> Setup:
    """Whether dynamo cuts graphs at the borders of DDP's buckets, so that a bucket is reduced while the next one's
    gradients are computed. Process-wide."""
    if setup.parallel != "ddp":
        return setup.did("ddp.optimize_ddp", "of ddp alone")
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = on
    return setup.did("ddp.optimize_ddp", f"{on}, for the whole process")


def _setting(name: str) -> None:
    """One of DeepSpeed's JSON, which a script has to give to `deepspeed.initialize` itself."""
    section, key = PLACES[name]

    def passed_on(setup: Setup, value: Any) -> Setup:
        if family(setup.parallel) != "deepspeed":
            return setup.did(name, "of DeepSpeed alone")
        if value == "auto":
            return replace(setup, yours={**setup.yours, name: f"leave {key} of {section} to DeepSpeed"})
        wrapper = {**setup.wrapper, section: {**setup.wrapper.get(section, {}), key: value}}
        line = f'"{section}": {{"{key}": {json.dumps(value)}}} in DeepSpeed\'s config'
        return replace(setup, wrapper=wrapper, yours={**setup.yours, name: line})

    knob(name)(passed_on)


_setting("deepspeed.overlap_comm")
_setting("deepspeed.reduce_bucket_size")
_setting("deepspeed.allgather_bucket_size")
_setting("deepspeed.deepcompile")


@knob("deepspeed.compile")
def engine_compile(setup: Setup, on: bool) -> Setup:
    """Leave the compiling of the whole model to DeepSpeed's engine, which puts its own hooks around it."""
    if family(setup.parallel) != "deepspeed":
        return setup.did("deepspeed.compile", "of DeepSpeed alone")
    if not on:
        return setup.did("deepspeed.compile", "off")
    options = dict(setup.options)
    backend = options.pop("backend", "inductor")
    line = f'after deepspeed.initialize: engine.compile(backend="{backend}", compile_kwargs={options})'
    return replace(setup, engine_compiles=True, yours={**setup.yours, "deepspeed.compile": line})
