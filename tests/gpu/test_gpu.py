"""What a CPU cannot show, on a depth-2 Llama-2-7B: attention kernels, CUDA graphs, memory, 4-bit layers, `apply`.

One command, a few minutes on one GPU: ``make test-gpu PYTHON=python3``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import torch._dynamo

import autocompile
from autocompile.knob_table import KnobValue
from autocompile.knobs import Setup, apply_config
from autocompile.records import Stage, Telemetry
from autocompile.slice.classify import classify
from autocompile.slice.telemetry import CompileObserver, sdpa_kernels
from autocompile.space import defaults
from autocompile.spec import Method, Precision, WorkloadSpec
from autocompile.workloads.job import Context, Job, prepare, trainable

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # a GPU host's libraries are whatever they are
]

STUDIES = Path(__file__).parents[2] / "studies"
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield


def job(
    method: str = "lora", depth: int | None = 2, micro_batch: int = 2, precision: Precision = Precision.BF16
) -> Job:
    workload = WorkloadSpec(model="llama2-7b", method=Method(method), precision=precision, sequence_length=512)
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    context = Context(device=DEVICE, dtype=dtype, micro_batch=micro_batch, sequence_length=512, depth=depth, seed=0)
    return prepare(context, workload)


class Seen:
    """What three steps of a job under a config did: telemetry, names from the profiler, peak memory, losses."""

    def __init__(self, made: Job, **knobs: KnobValue) -> None:
        optimizer = made.optimizer(trainable(made.model))
        batches = made.batches()
        with CompileObserver() as observer:
            self.setup = apply_config(Setup(model=made.model, regions=made.regions), {**defaults(), **knobs})

            def step() -> torch.Tensor:
                torch.compiler.cudagraph_mark_step_begin()
                return made.train_step(made.model, [next(batches)], optimizer)

            self.losses = [float(step()) for _ in range(4)]
            with torch.profiler.profile() as profile:
                step()
                torch.cuda.synchronize()
            self.telemetry: Telemetry = observer.telemetry(self.setup)
        self.names = [event.name for event in profile.events() or []]
        self.kernels = " ".join(sdpa_kernels(self.names)).lower()
        self.products = {name for name in self.names if "gemm" in name.lower() or "nvjet" in name.lower()}
        self.peak_bytes = torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("scope", ["none", "layer"])
def test_sdpa_decides_the_kernel_one_after_the_other_in_one_process_and_cache(scope: str) -> None:
    ran = {name: Seen(job(), scope=scope, sdpa=name).kernels for name in ("flash", "math", "cudnn", "efficient")}
    print(scope, ran)
    assert "flash" in ran["flash"] and "cudnn" not in ran["flash"]
    assert "cudnn" in ran["cudnn"]
    assert "efficient" in ran["efficient"] or "fmha" in ran["efficient"]
    assert not any(word in ran["math"] for word in ("flash", "cudnn", "efficient", "fmha"))


def test_reduce_overhead_replays_cuda_graphs_and_default_does_not() -> None:
    plain, graphs = Seen(job(), scope="layer"), Seen(job(), scope="layer", mode="reduce-overhead")
    launches = [sum("cudaGraphLaunch" in name for name in seen.names) for seen in (plain, graphs)]
    print("cudaGraphLaunch", launches, [skip.reason for skip in graphs.telemetry.cudagraph_skips])
    assert launches[0] == 0 < launches[1]
    assert graphs.losses == pytest.approx(plain.losses, rel=0.02)


def test_an_autotuned_mode_generates_other_code() -> None:
    # A few matrix products, since each takes some ten seconds to tune; LoRA's thin ones are not left to cuBLAS.
    plain = Seen(job(), scope="*.q_proj")
    tuned = Seen(job(), scope="*.q_proj", mode="max-autotune-no-cudagraphs")
    assert hashes(plain.telemetry) != hashes(tuned.telemetry)


@pytest.mark.parametrize("scope", ["none", "layer"])
def test_matmul_precision_decides_the_kernels_of_fp32_products(scope: str) -> None:
    def ran(precision: str) -> Seen:
        return Seen(job(precision=Precision.FP32), scope=scope, float32_matmul_precision=precision)

    exact, tf32, again = ran("highest"), ran("high"), ran("highest")
    print(scope, "highest", sorted(exact.products), "high", sorted(tf32.products))
    assert exact.products == again.products
    assert tf32.products != exact.products
    assert tf32.losses == pytest.approx(exact.losses, rel=0.02)


def test_checkpointing_needs_less_memory_eager_and_compiled() -> None:
    for scope in ("none", "layer"):
        kept = Seen(job(micro_batch=8), scope=scope).peak_bytes
        torch.cuda.reset_peak_memory_stats()
        recomputed = Seen(job(micro_batch=8), scope=scope, gradient_checkpointing=True).peak_bytes
        print(scope, f"{kept / 2**30:.2f} GiB, checkpointed {recomputed / 2**30:.2f} GiB")
        assert recomputed < kept


def test_cuda_graphs_with_checkpointing_run_or_fail_by_name() -> None:
    try:
        seen = Seen(job(), scope="layer", mode="reduce-overhead", gradient_checkpointing=True)
    except Exception as error:  # noqa: BLE001  whatever it is must have a name
        failure = classify(error, stage=Stage.WARMUP, memory_share=0.1)
        print("failed:", failure.kind, failure.subkind, failure.message)
        assert failure.kind == "compile_error"
    else:
        print("ran:", seen.losses)
        assert seen.losses == pytest.approx(Seen(job(), gradient_checkpointing=True).losses, rel=0.02)


def test_four_bit_layers_compile_whole() -> None:
    made = job("qlora")
    assert sum(isinstance(module, bitsandbytes.nn.Linear4bit) for module in made.model.modules()) == 14
    seen = Seen(made, scope="layer", fullgraph=True)
    assert seen.telemetry.compile_applied == "all" and not seen.telemetry.graph_breaks
    assert seen.losses == pytest.approx(Seen(job("qlora")).losses, rel=0.02)


def test_apply_compiles_the_graphs_that_the_study_reported() -> None:
    folder = STUDIES / "h200-llama2-7b-lora"
    study: dict[str, Any] = json.loads((folder / "study.json").read_text())
    best = autocompile.load(folder / "best.yaml")
    winner = next(
        trial
        for trial in study["trials"]
        if trial["number"] in best.evidence.confirmed_by and trial["config"] == best.config
    )
    made = job(depth=None, micro_batch=best.workload.micro_batch)
    with CompileObserver() as observer:
        applied = autocompile.apply(made.model, folder / "best.yaml")
        optimizer = made.optimizer(trainable(made.model))
        batches = made.batches()
        for _ in range(3):
            made.train_step(made.model, [next(batches)], optimizer)
        check = applied.check(lambda: made.train_step(made.model, [next(batches)], optimizer))
        telemetry = observer.telemetry(applied.setup)
    print("check:", check)
    assert not check.warnings
    assert hashes(telemetry) == [(region["name"], region["code_hashes"]) for region in winner["telemetry"]["regions"]]


def hashes(telemetry: Telemetry) -> list[tuple[str, list[str]]]:
    return [(region.name, list(region.code_hashes)) for region in telemetry.regions]
