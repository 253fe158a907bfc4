"""What a slice measures beside the step: waiting for data, the model's arithmetic, and the GPU's state through NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autocompile.records import Measured
from autocompile.spec import Method, WorkloadSpec

SLOW_DATA = Path(__file__).parents[1] / "workload_examples" / "slow_data.py"

Answer = dict[str, Any]


@pytest.mark.parametrize(
    ("micro_batches", "wait_seconds"),
    [
        pytest.param(1, 0.02, id="a slow loader"),
        pytest.param(3, 0.06, id="as often as a step has micro-batches"),
    ],
)
def test_the_wait_for_data_is_measured_and_is_part_of_the_step(
    measure, micro_batches: int, wait_seconds: float
) -> None:
    outcome = measure(WorkloadSpec(script=f"{SLOW_DATA}:build", global_batch=2 * micro_batches))
    assert isinstance(outcome, Measured), outcome
    wait = outcome.measurement.data_wait_seconds
    assert wait is not None
    assert wait_seconds <= wait < 2 * wait_seconds
    assert outcome.measurement.step_seconds.median > wait_seconds


def test_the_model_s_arithmetic_is_counted_on_a_cpu_which_has_no_gpu_state(measure) -> None:
    outcome = measure(WorkloadSpec(model="tiny-llama", method=Method.FULL, sequence_length=32))
    assert isinstance(outcome, Measured), outcome
    found = outcome.measurement
    weights = 2 * (4 * 256 * 256 + 3 * 256 * 688) + 256 * 2048
    attended = 2 * (256 * 32 + 256 * 32)  # keys and values of 32 tokens, as if they were weights
    flops = 6 * (weights + attended) * 2 * 32
    assert found.model_flops_per_second == pytest.approx(flops / found.step_seconds.median)
    assert found.data_wait_seconds is not None and found.data_wait_seconds < 0.002
    assert (found.gpu, found.mfu) == (None, None)


CHILD = """
import json, os, sys, time
from dataclasses import asdict
import torch
from autocompile.slice.gpu_state import opened
from autocompile.slice.measure import Stepper, steady_window
from autocompile.slice_plan import SlicePlan

class Quiet:
    def n_compiles(self): return 0
    def limit_hits(self): return []

for scenario in json.loads(sys.argv[1]):
    for name in [name for name in os.environ if name.startswith("STUB_")]:
        del os.environ[name]
    os.environ |= {f"STUB_{name}": str(value) for name, value in scenario.items()}
    steps = []
    stepper = Stepper(
        step=lambda: time.sleep(0.01) or torch.zeros(()),
        watch=Quiet(),
        device=torch.device("cpu"),
        stepped=lambda: steps.append(1),
        waited_seconds=lambda: 0.0,
        nvml=opened("12ab"),
    )
    window = steady_window(stepper, SlicePlan(interval=0, window_seconds=0.5))
    gpu = window.gpu and window.gpu.model_dump(mode="json")
    windows = round(len(steps) / window.step_seconds.n)
    print("ANSWER", json.dumps({"gpu": gpu, "flags": window.flags, "windows": windows, "losses": len(window.losses)}))
"""

SCENARIOS: dict[str, dict[str, str | int]] = {
    "calm": {},
    "capped": {"REASONS": 4, "WINDOWS": 9},
    "a neighbour for a moment": {"PROCESSES": 2, "WINDOWS": 1},
    "a neighbour who stays": {"PROCESSES": 2, "WINDOWS": 9},
    "hot": {"REASONS": 0x40, "WINDOWS": 9},
    "hot, with a neighbour": {"REASONS": 0x20, "PROCESSES": 3, "WINDOWS": 9},
    "no power": {"REFUSES": "power"},
    "no processes": {"REFUSES": "processes", "PROCESSES": 2, "WINDOWS": 9},
    "a slice": {"MIG": 1},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Windows measured beside an NVML library of ours, in one child."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.cpp")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return dict(zip(SCENARIOS, windows(folder, *SCENARIOS.values()), strict=True))


def windows(libraries: Path, *scenarios: dict[str, str | int]) -> list[Answer]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(scenarios)],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert child.returncode == 0, child.stderr
    lines = [line.removeprefix("ANSWER") for line in child.stdout.splitlines() if line.startswith("ANSWER")]
    return [{**json.loads(line), "log": child.stderr} for line in lines]


STATE = {"sm_clock_mhz": 1980, "power_watts": 651.5, "temperature_celsius": 61, "limits": ["sw_power_cap"]}


@pytest.mark.parametrize(
    ("scenario", "flags", "n_windows", "gpu"),
    [
        pytest.param("calm", [], 1, STATE, id="one window, its state recorded"),
        pytest.param("capped", [], 1, STATE, id="a power cap is recorded only"),
        pytest.param("a neighbour for a moment", [], 2, STATE, id="a second process repeats the window"),
        pytest.param("a neighbour who stays", ["disturbed"], 2, STATE, id="once, then it is flagged"),
        pytest.param(
            "hot",
            ["throttled"],
            2,
            STATE | {"limits": ["sw_power_cap", "hw_thermal_slowdown"]},
            id="so does a thermal slowdown",
        ),
        pytest.param(
            "hot, with a neighbour",
            ["throttled", "disturbed"],
            2,
            STATE | {"limits": ["sw_power_cap", "sw_thermal_slowdown"]},
            id="both at once",
        ),
        pytest.param("no power", [], 1, None, id="a refused call leaves the state unknown"),
        pytest.param("no processes", [], 1, STATE, id="refused processes leave the rest known"),
        pytest.param("a slice", [], 1, STATE, id="a MIG slice has its GPU's state"),
    ],
)
def test_a_window_and_the_gpu_s_state(
    answers: dict[str, Answer], scenario: str, flags: list[str], n_windows: int, gpu: Answer | None
) -> None:
    found = answers[scenario]
    assert (found["flags"], found["windows"], found["gpu"]) == (flags, n_windows, gpu)


def test_a_machine_without_nvml_says_so_in_the_log_and_measures(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    (found,) = windows(tmp_path, {})
    assert (found["gpu"], found["flags"]) == (None, [])
    assert "NVML: NVML Shared Library Not Found; clocks, power and temperature stay unknown" in found["log"]
