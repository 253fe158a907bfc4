"""What the knobs of wrappers do, told by what ran: ``python -m tests.isolation.rank_probe`` prints it as JSON.

One rank is enough: DDP and FSDP2 do with it what they do with several.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autocompile.knob_table import KNOBS
from autocompile.knobs import Setup, apply_config
from autocompile.slice.telemetry import CompileObserver
from autocompile.space import defaults
from autocompile.workloads.job import Job
from autocompile.workloads.parallel import Wrapped, wrapped

N_LAYERS, WIDTH = 6, 1024  # 4 MiB each
ROWS = 16


def trained(parallel: str, *, scope: str = "none", backend: str = "aot_eager", **knobs: Any) -> tuple[Wrapped, Setup]:
    """After one forward and backward pass."""
    layers = (layer for _ in range(N_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    model = nn.Sequential(*layers)
    job = Job(model=model, loss=lambda model, batch: model(batch).sum(), batches=batches, regions={"layer": "*"})
    named = {name.replace("__", "."): value for name, value in knobs.items()}
    config = {**{name: knob.default for name, knob in KNOBS.items()}, "scope": scope, "backend": backend, **named}
    setup = apply_config(Setup(model=model, regions=job.regions, parallel=parallel), config)
    found = wrapped(job, setup, n_micro_batches=1)
    found.job.loss(found.job.model, next(batches())).backward()
    return found, setup


def batches() -> Iterator[Tensor]:
    while True:
        yield torch.ones(2, WIDTH)


def bucket_graphs(**knobs: Any) -> int | None:
    with CompileObserver() as observer:
        _, setup = trained("ddp", scope="model", **knobs)
        return observer.telemetry(setup).bucket_graphs


def n_storages_of_gradients(**knobs: Any) -> int:
    found, _ = trained("ddp", **knobs)
    gradients = [parameter.grad for parameter in found.job.model.parameters()]
    return len({gradient.untyped_storage().data_ptr() for gradient in gradients if gradient is not None})


def sharded_after_forward(**knobs: Any) -> bool:
    found, _ = trained("fsdp", **knobs)
    found.job.loss(found.job.model, next(batches()))
    first: Any = found.job.model
    return isinstance(first[0].weight, DTensor)


class Reduced(TorchDispatchMode):
    """Sees in which dtypes FSDP2 gathers gradients for the message that reduces them."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "chunk_cat" in str(operator):
            self.dtypes.add(str(kwargs["out"].dtype))
        return operator(*args, **(kwargs or {}))


def dtypes_in_fsdp(**knobs: Any) -> dict[str, Any]:
    """Of weights in a forward pass, in a layer and in what belongs to the root, and of gradients on their way."""
    model = nn.Sequential(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))), nn.Linear(WIDTH, 8))
    regions = {"layer": "0.*"}
    job = Job(model=model, loss=lambda model, batch: model(batch).sum(), batches=batches, regions=regions)
    setup = apply_config(
        Setup(model=model, regions=regions, parallel="fsdp"),
        {**defaults(), **{f"fsdp.{name}": value for name, value in knobs.items()}},
    )
    found = wrapped(job, setup, n_micro_batches=1)
    seen: list[str] = []
    parts: Any = model
    for module in (parts[0][0], parts[1]):
        module.register_forward_pre_hook(lambda module, args: seen.append(str(module.weight.dtype)))
    with Reduced() as reduced:
        found.job.loss(found.job.model, next(batches())).backward()
    kept = {str(parameter.dtype) for parameter in model.parameters()}
    return {"weights": seen, "reduced": sorted(reduced.dtypes), "kept": sorted(kept)}


def saved_for_backward(parallel: str, **knobs: Any) -> int:
    """Numbers that one forward pass of a compiled layer keeps, without its weights."""
    layer = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(2)))
    job = Job(model=layer, loss=lambda model, batch: model(batch).sum(), batches=batches, regions={"layer": "*"})
    config = {**{name: knob.default for name, knob in KNOBS.items()}, "scope": "layer", "backend": "aot_eager", **knobs}
    setup = apply_config(Setup(model=layer, regions=job.regions, parallel=parallel), config)
    model = wrapped(job, setup, n_micro_batches=1).job.model
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() if tensor.shape[0] == ROWS else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.ones(ROWS, 8, requires_grad=True))
    return sum(kept)


def main() -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    torch._dynamo.reset()
    found = {
        "bucket graphs": [bucket_graphs(ddp__bucket_cap_mb=size) for size in (1, 100)],
        "without optimize_ddp": bucket_graphs(ddp__bucket_cap_mb=1, ddp__optimize_ddp=False),
        "storages": [n_storages_of_gradients(ddp__gradient_as_bucket_view=on) for on in (False, True)],
        "saved": {
            parallel: [saved_for_backward(parallel, gradient_checkpointing=on) for on in (False, True)]
            for parallel in ("none", "ddp", "fsdp")
        },
        "dtypes": [
            dtypes_in_fsdp(param_dtype=weights, reduce_dtype=gradients)
            for weights, gradients in (("as_is", "as_is"), ("bf16", "as_is"), ("bf16", "fp32"), ("as_is", "bf16"))
        ],
        "sharded": [sharded_after_forward(fsdp__reshard_after_forward=on) for on in (True, False)],
    }
    print("FOUND", json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
