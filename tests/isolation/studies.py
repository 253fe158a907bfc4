"""A small study for tests of the coordinator, and a program that runs it in a process of its own.

python -m tests.isolation.studies FOLDER OPTIONS   runs the study of `spec(**OPTIONS)` (JSON) in FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from autocompile.executors.local import LocalExecutor
from autocompile.space import SearchSpace
from autocompile.spec import Budget, StudySpec, WorkloadSpec
from autocompile.storage import Storage
from autocompile.tuner import Interrupted, StudyResult, open_study, preflight, tune
from tests.contract.fake_child import make_python

NAME = "study"
ROOT = Path(__file__).parents[2]
PLAIN_TRAINING = Path(__file__).with_name("plain_training.py")
SPACE = SearchSpace.model_validate(
    {
        "format": 1,
        "parameters": {
            "scope": {"choices": ["none", "layer"], "default": "none", "why": "a test"},
            "micro_batch": {"low": 2, "high": 8, "scale": "log2", "default": 4, "why": "a test"},
        },
    }
)


def spec(*, budget: float | None = None, trials: int | None = 6, **options: Any) -> StudySpec:
    return StudySpec(
        workload=WorkloadSpec(model="tiny-llama", sequence_length=512, options=options),
        space=SPACE,
        budget=Budget(seconds=budget, trials=trials),
    )


def trained_plainly(best: Path, *, cache: Path) -> tuple[dict[str, Any], str]:
    """What a plain training script found with this best-config file, and what it logged."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PLAIN_TRAINING), str(best)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("APPLIED "))
    return json.loads(line.removeprefix("APPLIED ")), done.stderr


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def run(folder: Path, asked: StudySpec, *, name: str = NAME, stop: threading.Event | None = None) -> StudyResult:
    """Preflight, open or resume, tune: with the fake child in real processes and a real file."""
    stop = stop or threading.Event()
    executor = LocalExecutor(make_python(folder), stop)
    facts = preflight(asked, executor, folder_root=folder)
    with Storage.open(url(folder)) as storage:
        open_study(asked, name=name, storage=storage, facts=facts, folder_root=folder)
        return tune(asked, name=name, storage=storage, executor=executor, folder=folder / name, slots=((),), stop=stop)


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]), spec(**json.loads(sys.argv[2])))
    except Interrupted as interruption:
        sys.exit(interruption.exit_code)
