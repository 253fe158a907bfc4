"""How a slice measures on a real GPU: pre-heated, past recording, beside NVML, alone or not."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
import torch._dynamo
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

from autocompile.knob_table import KnobValue
from autocompile.knobs import Setup, apply_config
from autocompile.slice.flops import matmul_flops_per_second
from autocompile.slice.gpu_state import PERIOD_SECONDS, Nvml, opened
from autocompile.slice.measure import Stepper, steady_window, warm_up
from autocompile.slice.telemetry import CompileObserver
from autocompile.slice_plan import SEARCH_SLICE, SlicePlan
from autocompile.space import defaults
from autocompile.spec import Method, Precision, WorkloadSpec
from autocompile.workloads.job import Context, prepare, trainable

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # a GPU host's libraries are whatever they are
]

DEVICE = torch.device("cuda", 0)
NEIGHBOUR = """
import torch
matrix = torch.randn(4096, 4096, device="cuda")
print("busy", flush=True)
while True:
    matrix @ matrix
    torch.cuda.synchronize()
"""


def nvml() -> Nvml:
    found = opened(str(torch.cuda.get_device_properties(DEVICE).uuid))
    assert found is not None
    return found


def stepper(observer: CompileObserver, **knobs: KnobValue) -> Stepper:
    torch._dynamo.reset()
    observer.restart()
    workload = WorkloadSpec(model="llama2-7b", method=Method.LORA, precision=Precision.BF16, sequence_length=512)
    job = prepare(Context.of(workload, {"micro_batch": 4}, device=DEVICE, seed=0, depth=2), workload)
    apply_config(Setup(model=job.model, regions=job.regions), {**defaults(), **knobs})
    optimizer, batches = job.optimizer(trainable(job.model)), job.batches()

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return job.train_step(job.model, [next(batches)], optimizer).detach().clone()

    return Stepper(
        step=step, watch=observer, device=DEVICE, stepped=lambda: None, waited_seconds=lambda: 0.0, nvml=nvml()
    )


def test_each_recording_of_a_cuda_graph_is_noise_and_none_is_left_for_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recordings: list[int] = []
    record = CUDAGraphTreeManager.record_function

    def counting(self: CUDAGraphTreeManager, *rest: object) -> object:
        recordings.append(1)
        return record(self, *rest)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", counting)
    with CompileObserver() as observer:
        one = stepper(observer, scope="layer", mode="reduce-overhead")
        seen = []
        for _ in range(6):
            before = len(recordings), observer.n_compiles()
            one.step()
            torch.cuda.synchronize()
            seen.append((len(recordings) - before[0], observer.n_compiles() - before[1]))
        print("recordings and compiles of each step:", seen)
        assert any(recorded for recorded, _ in seen)
        assert all(noise for recorded, noise in seen if recorded)
        warm_up(one, SEARCH_SLICE)
        before_window = len(recordings)
        steady_window(one, SEARCH_SLICE)
        assert len(recordings) == before_window


def test_a_window_is_hot_and_alone_and_its_events_agree_with_the_wall_clock() -> None:
    with CompileObserver() as observer:
        one = stepper(observer)
        began = time.perf_counter()
        warm_up(one, SEARCH_SLICE)
        assert time.perf_counter() - began >= SEARCH_SLICE.preheat_seconds
        window = steady_window(one, SlicePlan(interval=0, window_seconds=3))
    print(window.step_seconds, window.gpu, window.flags)
    assert window.flags == ()
    assert window.gpu is not None
    assert window.gpu.sm_clock_mhz > 300 and window.gpu.power_watts > 50


def test_another_process_that_uses_the_sm_disturbs_the_window() -> None:
    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True)
    try:
        assert neighbour.stdout is not None and neighbour.stdout.readline() == "busy\n"
        with CompileObserver() as observer:
            one = stepper(observer)
            warm_up(one, SEARCH_SLICE)
            window = steady_window(one, SlicePlan(interval=0, window_seconds=3))
        print(window.step_seconds, window.gpu, window.flags)
        assert "disturbed" in window.flags
    finally:
        neighbour.kill()
        neighbour.wait()


def test_sampling_keeps_the_host_busy_for_less_than_half_a_percent() -> None:
    device = nvml()
    device.sample()
    began = time.thread_time()
    for _ in range(20):
        device.sample()
        device.processes(0)
    seconds = (time.thread_time() - began) / 20
    print(f"one sample: {seconds * 1e3:.2f} ms of the processor")
    assert seconds / PERIOD_SECONDS < 0.005


def test_the_ceiling_follows_the_precision() -> None:
    found = {precision: matmul_flops_per_second(DEVICE, precision) for precision in Precision}
    print({str(precision): f"{(flops or 0) / 1e12:.0f} TFLOP/s" for precision, flops in found.items()})
    bf16, mixed, fp32 = (found[one] for one in (Precision.BF16, Precision.BF16_MIXED, Precision.FP32))
    assert bf16 is not None and fp32 is not None
    assert bf16 > 4 * fp32  # without TF32
    assert mixed == pytest.approx(bf16, rel=0.2)  # a hot GPU clocks lower: 799 and 707 TFLOP/s on one H200
