"""From the command to a user's training: what is no mismatch, and that a study's own file runs what it measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.test_commands import FOLDER, ROOT, STUDY, run
from tests.isolation.conftest import inductor_seed  # noqa: F401  a fixture
from tests.isolation.studies import trained_plainly

GRADIENTS = ROOT / "tests" / "workload_examples" / "gradients.py"
SPACE = """
format: 1
parameters:
  scope: {choices: [none, layer], default: none, why: a test}
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inductor_seed: Path) -> Path:  # noqa: F811
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shutil.copytree(inductor_seed, tmp_path / "studies" / ".seed")
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def tuned(here: Path, workload: dict[str, Any], plan: dict[str, Any], *more: object) -> dict[str, Any]:
    spec = {
        "workload": {**workload, "device": "cpu"},
        "space": "space.yaml",
        "pinned": {"micro_batch": 2},
        "plan": plan,
    }
    (here / "study.yaml").write_text(yaml.safe_dump(spec))
    code, out, err = run(here, "tune", "--spec", "study.yaml", "--study", STUDY, "--json", *more, timeout=240)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("function", "fault", "note"),
    [
        pytest.param("rotary", "", "", id="bf16 whose values are a sixteenth apart"),
        pytest.param("build", "two dropouts", "dropout was off", id="other masks than eager's"),
    ],
)
def test_what_rounds_or_draws_otherwise_is_no_mismatch(here: Path, function: str, fault: str, note: str) -> None:
    workload = {"script": f"{GRADIENTS}:{function}", "options": {"fault": fault}}
    trials = tuned(here, workload, {"type": "grid"})["trials"]
    assert [(trial["config"]["scope"], trial["state"]) for trial in trials] == [
        ("none", "COMPLETE"),
        ("layer", "COMPLETE"),
    ]
    numerics = trials[1]["telemetry"]["numerics"]
    assert numerics["checked"] and note in (numerics["note"] or "")


def test_training_with_the_study_s_own_file_runs_what_was_measured(here: Path) -> None:
    workload = {"model": "tiny-llama", "method": "full", "sequence_length": 32}
    twice = {"type": "paired", "configs": [{"scope": "layer"}, {"scope": "layer"}]}
    trials = tuned(here, workload, twice, "--budget", "60s")["trials"]
    found, _ = trained_plainly(here / FOLDER / "best.yaml", cache=here / "another" / "cache")
    measured = [region["code_hashes"] for region in trials[0]["telemetry"]["regions"]]
    assert found["hashes"] == measured != []
    assert found["same_keys"] and not found["warnings"]


def test_ways_to_train_are_compared_at_one_global_batch(here: Path) -> None:
    ways = "  parallel: {choices: [ddp, none], default: ddp, why: a test}\n"
    (here / "space.yaml").write_text(SPACE.replace("[none, layer]", "[none]") + ways)
    workload = {"model": "tiny-llama", "method": "full", "sequence_length": 32, "global_batch": 8}
    trials = tuned(here, {**workload, "parallel": "auto", "gpus_per_trial": 2}, {"type": "grid"})["trials"]
    found = {trial["config"]["parallel"]: trial["measurement"] for trial in trials}
    ranks = {way: len(measurement["peak_memory_bytes_by_rank"]) for way, measurement in found.items()}
    assert ranks == {"ddp": 2, "none": 0}  # who is alone has no ranks
    for measurement in found.values():
        tokens = measurement["tokens_per_second"] * measurement["step_seconds"]["median"]
        assert tokens == pytest.approx(8 * 32, rel=0.2)
    assert "By way to train" in (here / FOLDER / "report.md").read_text()
