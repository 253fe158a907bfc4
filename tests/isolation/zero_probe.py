"""What DeepSpeed's knobs do, told by what ran: ``python -m tests.isolation.zero_probe`` prints it as JSON.

One rank is enough: DeepSpeed sends to itself what it would send to others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autocompile.knobs import NotApplicable, apply_config
from autocompile.slice.telemetry import CompileObserver
from autocompile.space import defaults
from autocompile.spec import Parallel, WorkloadSpec
from autocompile.workloads.job import Job
from autocompile.workloads.parallel import EngineStep, Wrapped, setup_of, wrapped

N_LAYERS, WIDTH = 6, 256
LAYER = WIDTH * WIDTH  # numbers in one
MARK = "gradient of the first layer"


def batches() -> Iterator[Tensor]:
    while True:
        yield torch.ones(2, WIDTH, device=device())


def device() -> torch.device:
    """This rank's GPU, where it has one."""
    return torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")


def job() -> Job:
    layers = (layer for _ in range(N_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    model = nn.Sequential(*layers).to(device())
    return Job(model=model, loss=lambda model, batch: model(batch).sum(), batches=batches, regions={"layer": "*"})


class Stepped:
    """A job after some optimizer steps, the last of them under the profiler."""

    def __init__(self, stage: int | str, user: dict[str, Any] | None = None, **knobs: Any) -> None:
        parallel = Parallel(f"zero{stage}")
        workload = WorkloadSpec(script="a.py:b", parallel=parallel, gpus_per_trial=2, deepspeed_config=user)
        made = job()
        named = {name.replace("__", "."): value for name, value in knobs.items()}
        config = {**defaults(), **named}
        with CompileObserver() as observer:
            self.setup = apply_config(setup_of(made, workload), config)
            observer.groups = self.setup.groups
            ranks = wrapped(made, self.setup, n_micro_batches=1)
            self.engine: Any = ranks.job.model
            assert isinstance(ranks.job.train_step, EngineStep)
            for _ in range(2):
                ranks.job.train_step(self.engine, [next(batches())], ranks.optimizer)
            self.operators = self._watched(ranks, made)
            self.telemetry = observer.telemetry(self.setup)

    def _watched(self, ranks: Wrapped, made: Job) -> list[str]:
        """The names of what one step ran, in their order, and the mark among them."""

        def mark(_: Tensor) -> None:
            with torch.profiler.record_function(MARK):
                pass

        first: Any = made.model
        handle = first[0].weight.register_hook(mark)
        with torch.profiler.profile() as profile:
            ranks.job.train_step(self.engine, [next(batches())], ranks.optimizer)
        handle.remove()
        events = sorted(profile.events() or [], key=lambda event: event.time_range.start)
        return [event.name for event in events]

    def n_messages(self) -> int:
        return sum(name.startswith("c10d::") for name in self.operators)

    def n_messages_before_the_mark(self) -> int:
        return sum(name.startswith("c10d::") for name in self.operators[: self.operators.index(MARK)])


SMALL = {"deepspeed__reduce_bucket_size": 2 * LAYER}


def engine_compile(**knobs: Any) -> dict[str, Any]:
    found = Stepped(1, scope="model", backend="aot_eager", **knobs)
    regions = {region.name: (region.graphs, region.calls) for region in found.telemetry.regions}
    return {
        "engine": found.engine.is_compiled,
        "applied": found.telemetry.compile_applied,
        "model": regions["model:Sequential"],
    }


def resets_seen() -> list[int]:
    with CompileObserver() as observer:
        counts = [observer.n_compiles()]
        torch._dynamo.reset()
        return [*counts, observer.n_compiles(), observer.n_compiles()]


def refused(**knobs: Any) -> str | None:
    try:
        Stepped(1, **knobs)
    except NotApplicable as error:
        return str(error)
    return None


def user_settings() -> dict[str, Any]:
    """What DeepSpeed made of a user's file."""
    user = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 7,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "allgather_bucket_size": 2e8},
    }
    engine = Stepped(1, user, deepspeed__allgather_bucket_size=200_000_000).engine
    return {
        "clipping": engine.optimizer.clip_grad,
        "offloaded": engine.optimizer.cpu_offload,
        "accumulation": engine.gradient_accumulation_steps(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "scheduler": engine.lr_scheduler is not None,
    }


def main() -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    import deepspeed.comm

    found = {
        "messages": {
            stage: [Stepped(stage, **knobs).n_messages() for knobs in ({}, SMALL)] for stage in ("1", "2", "3")
        },
        "early": [
            Stepped(1, **SMALL, deepspeed__overlap_comm=on).n_messages_before_the_mark() for on in ("auto", False, True)
        ],
        "resets": resets_seen(),
        "gathers in one message": deepspeed.comm.has_all_gather_into_tensor(),
        "compiled": [engine_compile(deepspeed__compile=on) for on in (False, True)],
        "refused": refused(scope="model", deepspeed__compile=True, deepspeed__deepcompile=True),
        "user": user_settings(),
    }
    print("FOUND", json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
