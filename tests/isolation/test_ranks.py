"""Several ranks that measure together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from autocompile.records import Failed, Measured
from autocompile.spec import Parallel, Precision, WorkloadSpec
from tests.acceptance.test_commands import ROOT

WORLD = 2
PARALLEL = [Parallel.DDP, Parallel.FSDP, Parallel.ZERO1, Parallel.ZERO2, Parallel.ZERO3]
HOOKS = "deepspeed"  # ZeRO-3's run between all modules, and dynamo recompiles them for each

pytestmark = pytest.mark.timeout(300)


def llama(parallel: Parallel, **fields: object) -> WorkloadSpec:
    return WorkloadSpec(
        model="tiny-llama", sequence_length=32, parallel=parallel, gpus_per_trial=WORLD, **{"method": "full", **fields}
    )


@pytest.mark.parametrize("parallel", PARALLEL)
def test_ranks_train_as_one_would(measure, parallel: Parallel) -> None:
    """Two micro-batches each: loss and gradients are those of one rank that has the batches of both."""
    outcome = measure(llama(parallel, global_batch=4 * WORLD))
    assert isinstance(outcome, Measured), outcome
    found, numerics = outcome.measurement, outcome.telemetry.numerics
    assert found.tokens_per_second == pytest.approx(4 * WORLD * 32 / found.step_seconds.median, rel=0.2)
    assert len(found.peak_memory_bytes_by_rank) == WORLD
    assert found.peak_memory_bytes == max(found.peak_memory_bytes_by_rank)
    assert numerics is not None and numerics.checked, numerics


@pytest.mark.parametrize("parallel", [Parallel.DDP, Parallel.FSDP, Parallel.ZERO0, Parallel.ZERO1, Parallel.ZERO2])
def test_ranks_compile_what_one_would(measure, parallel: Parallel) -> None:
    outcome = measure(llama(parallel), scope="layer", fullgraph=True)
    assert isinstance(outcome, Measured), outcome
    telemetry = outcome.telemetry
    assert (telemetry.compile_applied, telemetry.graphs, telemetry.graph_breaks) == ("all", 1, ())
    assert len(telemetry.regions) == 1 and telemetry.regions[0].code_hashes
    assert bool(telemetry.bucket_graphs) == (parallel is Parallel.DDP)
    assert telemetry.numerics is not None and telemetry.numerics.checked


def test_the_hooks_of_zero_3_are_named(measure) -> None:
    outcome = measure(llama(Parallel.ZERO3), scope="layer")
    assert isinstance(outcome, Failed), outcome
    assert (outcome.failure.kind, outcome.failure.stage) == ("recompile_storm", "warmup")
    assert HOOKS in outcome.failure.message
    breaks = outcome.telemetry.graph_breaks
    assert any(f"{HOOKS}/" in found.where or "DeepSpeed" in found.reason for found in breaks)


def test_adapters_are_sharded_beside_weights_of_another_dtype(measure) -> None:
    outcome = measure(llama(Parallel.FSDP, method="lora", precision=Precision.BF16))
    assert isinstance(outcome, Measured), outcome
    assert outcome.telemetry.numerics is not None and outcome.telemetry.numerics.checked


def test_weights_and_gradients_in_dtypes_of_their_own(measure) -> None:
    """The policy's dtypes are told by the probe; here that training with them is within what bf16 rounds."""
    outcome = measure(
        llama(Parallel.FSDP, precision=Precision.BF16_MIXED, global_batch=4 * WORLD),
        **{"fsdp.param_dtype": "bf16", "fsdp.reduce_dtype": "fp32"},
    )
    assert isinstance(outcome, Measured), outcome
    assert outcome.telemetry.numerics is not None and outcome.telemetry.numerics.checked


def probed(module: str) -> dict[str, Any]:
    """What this probe found in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), "")
    assert line, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def test_each_knob_of_a_wrapper_does_something() -> None:
    found = probed("tests.isolation.rank_probe")
    small, large = found["bucket graphs"]
    assert small > large > 1
    assert found["without optimize_ddp"] is None
    alone, shared = found["storages"]
    assert alone == 6 > shared
    assert found["sharded"] == [True, False]
    fp32, bf16 = "torch.float32", "torch.bfloat16"
    assert found["dtypes"] == [
        {"weights": [weights, weights], "reduced": [reduced], "kept": [fp32]}
        for weights, reduced in ((fp32, fp32), (bf16, bf16), (bf16, fp32), (fp32, bf16))
    ]
    assert found["saved"]["fsdp"] == found["saved"]["ddp"] == found["saved"]["none"]
    everything, checkpointed = found["saved"]["fsdp"]
    assert 0 < checkpointed < everything


USERS = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
}


def test_deepspeed_compiles_and_has_the_users_settings(measure) -> None:
    """What it was given is judged by the loss and gradients; what it did by its own messages in the probe."""
    knobs = {"overlap_comm": True, "reduce_bucket_size": 50_000, "compile": True}
    outcome = measure(
        llama(Parallel.ZERO1, deepspeed_config=USERS),
        scope="model",
        backend="aot_eager",
        **{f"deepspeed.{name}": value for name, value in knobs.items()},
    )
    assert isinstance(outcome, Measured), outcome
    telemetry = outcome.telemetry
    assert (telemetry.compile_applied, telemetry.regions[0].graphs) == ("all", 1), telemetry
    assert telemetry.numerics is not None and telemetry.numerics.checked


def test_each_knob_of_deepspeed_does_something() -> None:
    found = probed("tests.isolation.zero_probe")
    assert found["messages"] == {stage: [2, 4] for stage in ("1", "2", "3")}
    assert found["early"] == [0, 0, 2]
    assert found["resets"] == [0, 1, 1]
    assert found["gathers in one message"]  # or deepspeed.allgather_bucket_size would do something
    ours, engines = found["compiled"]
    assert found["refused"] == "deepspeed.deepcompile: DeepSpeed's DeepCompile needs CUDA"
    assert (ours["engine"], engines["engine"], engines["applied"], engines["model"]) == (False, True, "all", [1, 3])
    assert found["user"] == {
        "clipping": 0.5,
        "offloaded": True,
        "accumulation": 1,
        "optimizer": "AdamW",
        "scheduler": False,
    }
