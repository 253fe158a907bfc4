"""Knobs of what is wrapped around a model that trains on several GPUs; who wraps it passes them on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    family, _, argument = name.partition(".")

    def passed_on(setup: Setup, value: Any) -> Setup:
        if setup.parallel != family:
            return setup.did(name, f"of {family} alone")
        options = {**setup.wrapper, argument: value}
        return replace(setup, wrapper=options, yours={**setup.yours, name: f"{function}(..., {argument}={value})"})

    knob(name)(passed_on)


_argument("ddp.bucket_cap_mb", "DistributedDataParallel")
_argument("ddp.gradient_as_bucket_view", "DistributedDataParallel")
_argument("fsdp.reshard_after_forward", "fully_shard")


@knob("ddp.optimize_ddp")
def optimize_ddp(setup: Setup, on: bool) -> Setup:
    """Whether dynamo cuts graphs at the borders of DDP's buckets, so that a bucket is reduced while the next one's
    gradients are computed. Process-wide."""
    if setup.parallel != "ddp":
        return setup.did("ddp.optimize_ddp", "of ddp alone")
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = on
    return setup.did("ddp.optimize_ddp", f"{on}, for the whole process")
