"""What a rank that fails, hangs or is killed is called, and that nothing of its slice goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autocompile.executors.deadlines import Limits
from autocompile.executors.local import LocalExecutor
from autocompile.records import Failed
from autocompile.space import defaults
from autocompile.spec import FULL_DEPTH, MeasureRequest, Parallel, Precision, Role, WorkloadSpec
from tests.isolation.test_slices import FAULTS

WORLD = 2

pytestmark = pytest.mark.timeout(300)


def faulty(fault: str) -> WorkloadSpec:
    """Rank 1 has the fault."""
    return WorkloadSpec(
        script=f"{FAULTS}:build", parallel=Parallel.DDP, gpus_per_trial=WORLD, options={"fault": fault, "rank": 1}
    )


@pytest.mark.parametrize(("fault", "kind"), [("out of memory", "oom"), ("killed", "host_oom")])
def test_the_rank_at_fault_is_believed(measure, tmp_path: Path, fault: str, kind: str) -> None:
    """Not the other one, whose connection it closed."""
    outcome = measure(faulty(fault))
    assert isinstance(outcome, Failed), outcome
    assert outcome.failure.kind == kind, outcome.failure
    assert_nothing_left(tmp_path)


def request(workload: WorkloadSpec, cache: Path) -> MeasureRequest:
    return MeasureRequest(
        workload=workload.model_copy(update={"device": "cpu", "precision": Precision.FP32}),
        config={**defaults(), "micro_batch": 2},
        role=Role.SEARCH,
        fidelity=FULL_DEPTH,
        seed=0,
        devices=(),
        deadline_seconds=200.0,
        cache_folder=str(cache),
    )


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    executor = LocalExecutor(sys.executable, threading.Event(), limits=Limits(step_seconds=5.0))
    outcome = executor.run(request(faulty("hang"), tmp_path / "cache"), tmp_path)
    assert isinstance(outcome, Failed), outcome
    assert outcome.failure.kind == "hang", outcome.failure
    assert_nothing_left(tmp_path)


COORDINATOR = """
import sys, threading
from pathlib import Path
from autocompile.executors.local import LocalExecutor
from autocompile.slice.process import REQUEST
folder = Path(sys.argv[1])
request = REQUEST.validate_json((folder / "asked.json").read_text())
print(LocalExecutor(sys.executable, threading.Event(), warm=False).run(request, folder).model_dump_json())
"""


@pytest.mark.parametrize("victim", ["the slice", "the coordinator"])
def test_whoever_is_killed_no_rank_goes_on(tmp_path: Path, victim: str) -> None:
    (tmp_path / "asked.json").write_text(request(faulty("hang"), tmp_path / "cache").model_dump_json())
    command = [sys.executable, "-c", COORDINATOR, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as coordinator:
        wait(lambda: (tmp_path / "progress1.json").exists() and len(slices_of(tmp_path)) == 1 + WORLD)
        launcher = next(pid for pid, line in slices_of(tmp_path).items() if "autocompile.slice.rank" not in line)
        os.kill(launcher if victim == "the slice" else coordinator.pid, signal.SIGKILL)
        said, _ = coordinator.communicate(timeout=60)
    wait(lambda: not slices_of(tmp_path))
    if victim == "the slice":
        assert '"kind":"host_oom"' in said
    else:
        assert said == ""


def slices_of(folder: Path) -> dict[int, str]:
    """The living processes of slices in this folder, by pid, with their command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:  # it ended
            continue
        if "autocompile.slice" in line and str(folder) in line and "-c" not in line.split():
            found[int(process.name)] = line
    return found


def wait(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def assert_nothing_left(folder: Path) -> None:
    wait(lambda: not slices_of(folder), seconds=10.0)
