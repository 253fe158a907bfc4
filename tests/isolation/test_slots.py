"""What a slice starts stays on the CPUs of its slot, whichever way it was started."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autocompile.executors.local import LocalExecutor
from autocompile.records import Failed
from autocompile.space import defaults
from autocompile.spec import FULL_DEPTH, MeasureRequest, Parallel, Precision, Role, WorkloadSpec
from autocompile.tuner.folders import copy_seed

SCRIPT = Path(__file__).parents[1] / "workload_examples" / "cpus.py"
CPUS = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(CPUS) < 2, reason="two slots need two CPUs"),
]


@pytest.fixture
def cache(tmp_path: Path, inductor_seed: Path) -> Path:
    copy_seed(inductor_seed, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    """Its server counts all CPUs, as users' do: the tests' others are told to use one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS")
        yield LocalExecutor(sys.executable, threading.Event())


def what_was_seen(executor: LocalExecutor, cache: Path, cpu: int, *, n_ranks: int = 1) -> list[dict[str, object]]:
    """By each rank of a slice on this CPU; one alone compiles there too, several would take 10 s for the same."""
    folder = cache.parent / f"slice{cpu}"
    folder.mkdir()
    request = MeasureRequest(
        workload=WorkloadSpec(
            script=f"{SCRIPT}:build",
            options={"folder": str(folder)},
            precision=Precision.FP32,
            device="cpu",
            parallel=Parallel.DDP if n_ranks > 1 else Parallel.NONE,
            gpus_per_trial=n_ranks,
        ),
        config={**defaults(), "micro_batch": 2, "scope": "model" if n_ranks == 1 else "none"},
        role=Role.SEARCH,
        fidelity=FULL_DEPTH,
        seed=0,
        devices=(),
        deadline_seconds=240,
        cache_folder=str(cache),
        numerics=False,
        cpus=(cpu,),
    )
    answer = executor.run(request, folder)
    assert isinstance(answer, Failed) and answer.failure.message.endswith("RuntimeError: seen"), answer
    assert bool(answer.telemetry.graphs) == (n_ranks == 1)
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(n_ranks)]


def only(cpu: int, *, worker: bool = True) -> dict[str, object]:
    """Threads are as many as there are CPUs."""
    seen = {"process": [cpu], "threads": [cpu], "worker": [cpu] if worker else []}
    return {**seen, "n_threads": 1, "n_compile_threads": 1}


def test_slices_beside_each_other_stay_on_their_cpus(executor: LocalExecutor, cache: Path) -> None:
    """An interpreter of its own beside a fork, and all that they start."""
    fresh = LocalExecutor(sys.executable, threading.Event(), warm=False)
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda each, cpu: what_was_seen(each, cache, cpu), (fresh, executor), CPUS)
        assert list(found) == [[only(CPUS[0])], [only(CPUS[1])]]


def test_ranks_stay_on_the_cpus_of_their_slice(executor: LocalExecutor, cache: Path) -> None:
    assert what_was_seen(executor, cache, CPUS[1], n_ranks=2) == [only(CPUS[1]), only(CPUS[1], worker=False)]
