"""What tests that compile share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from autocompile.executors.local import LocalExecutor
from autocompile.knob_table import KnobValue
from autocompile.records import Failed, Measured, Outcome
from autocompile.space import defaults
from autocompile.spec import Fidelity, MeasureRequest, Precision, Role, WorkloadSpec
from autocompile.tuner.folders import copy_seed

CACHE = Path(__file__).parents[2] / ".cache"
PROBE = "import torch._inductor.cpu_vec_isa as isa; isa.valid_vec_isa_list()"


@pytest.fixture(scope="session")
def inductor_seed() -> Path:
    """An inductor cache that holds only the probe of the CPU's vector instructions (14 s); kept in .cache."""
    seed = CACHE / f"inductor-seed-{version('torch')}"
    if not seed.is_dir():
        CACHE.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(made)}
        subprocess.run([sys.executable, "-c", PROBE], env=environment, check=True, timeout=300)
        try:
            made.rename(seed)
        except OSError:  # another test worker was faster
            shutil.rmtree(made)
    return seed


@pytest.fixture(scope="session")
def executor():
    """One for all tests of a worker, which need not import torch for each slice then."""
    return LocalExecutor(sys.executable, threading.Event())


@pytest.fixture
def measure(tmp_path: Path, inductor_seed: Path, executor: LocalExecutor):
    """Run one slice with these knobs, from a cache that holds no compiled code."""

    def run(
        workload: WorkloadSpec, *, compile_threads: int | None = None, numerics: bool = True, **knobs: KnobValue
    ) -> Outcome:
        cache = tmp_path / "cache"
        copy_seed(inductor_seed, cache)
        (tmp_path / "slice").mkdir()
        request = MeasureRequest(
            workload=workload.model_copy(update={"device": "cpu", "precision": workload.precision or Precision.FP32}),
            config={**defaults(), "micro_batch": 2, **knobs},
            role=Role.SEARCH,
            fidelity=Fidelity(layers=2),
            seed=0,
            devices=(),
            deadline_seconds=240,
            cache_folder=str(cache),
            compile_threads=compile_threads,
            numerics=numerics,
        )
        answer = executor.run(request, tmp_path / "slice")
        assert isinstance(answer, Measured | Failed)
        return answer

    return run
