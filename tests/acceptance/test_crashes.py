"""Killed at any moment, the command goes on as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from autocompile.records import TrialRecord
from tests.acceptance.known_study import (
    MARK,
    N_TRIALS,
    TRIALS,
    Whole,
    answers,
    assert_nothing_left,
    by_config,
    finished,
    grid,
    name_of,
    place,
    processes_of,
    states,
    undisturbed,
)
from tests.acceptance.test_commands import FOLDER, ROOT, STUDY, run, shown, started, words
from tests.isolation.conftest import inductor_seed  # noqa: F401  a fixture

N_KILLS = 10
# Runs slices as they are, but finds the machine as the first preflight found it, which takes eight seconds each time.
PYTHON = f"""#!/bin/sh
facts=studies/{STUDY}/facts.json
if [ -f $facts ] && grep -q '"preflight"' "$3/request.json"; then exec cp $facts "$3/outcome.json"; fi
exec {sys.executable} "$@"
"""
SCRIPT = ROOT / "tests" / "workload_examples" / "blocks.py"
REAL = {
    "workload": {"script": f"{SCRIPT}:build", "device": "cpu"},
    "space": "scopes.yaml",
    "pinned": {"micro_batch": 2},
    "plan": {"type": "grid"},
}
SCOPES = """
format: 1
parameters:
  scope: {choices: [none, layer], default: none, why: a test}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the commands run."""
    folder = place(tmp_path)
    monkeypatch.setenv(MARK, str(folder))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return undisturbed(tmp_path_factory.mktemp("whole"))


def killed_somewhere(here: Path, command: Sequence[str], rng: random.Random) -> None:
    """Start the command and kill it: while it starts, or around the life of its first, second or third slice."""
    n_more = rng.randrange(4)
    moment = rng.uniform(0, 1.2 if n_more == 0 else 0.15)
    wanted = n_trials(here) + n_more
    with started(here, command) as process:
        wait(lambda: n_trials(here) >= wanted or process.poll() is not None)
        time.sleep(moment)
        process.kill()
        process.wait(10)


def killed_when(here: Path, command: Sequence[str], file: Path, text: str) -> None:
    """Start the command and kill it as soon as this file has this text."""
    with started(here, command) as process:
        wait(lambda: file.exists() and text in file.read_text())
        process.kill()
        process.wait(10)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def n_trials(here: Path) -> int:
    return len(list((here / TRIALS).glob("*")))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_study_killed_ten_times_is_the_study_that_nobody_killed(here: Path, whole: Whole, seed: int) -> None:
    command, rng = grid(here), random.Random(seed)
    known: dict[int, TrialRecord] = {}
    told: dict[int, bytes] = {}
    for _ in range(N_KILLS):
        killed_somewhere(here, command, rng)
        assert_nothing_left(here)
        now, said = finished(here), answers(here)
        assert known.items() <= now.items()
        assert told.items() <= said.items()
        known, told = now, said
    code, out, err = run(here, *command)
    assert code == 0, err
    assert_nothing_left(here)
    assert known.items() <= finished(here).items()
    document = json.loads(out)
    assert document == shown(here)
    assert by_config(document) == by_config(whole.document)
    for field in ("result", "config", "speedup"):
        assert document["verdict"][field] == whole.document["verdict"][field]
    complete = [trial for trial in document["trials"] if trial["state"] == "COMPLETE"]
    assert all(answers(here)[trial["number"]] == whole.answers[name_of(trial)] for trial in complete)
    lost = [trial for trial in document["trials"] if trial["state"] == "FAIL"]
    assert states(document) <= {"COMPLETE", "FAIL"}
    assert {trial["stopped"]["reason"] for trial in lost} <= {"lost"}
    assert len(lost) <= N_KILLS
    assert not {trial["number"] for trial in lost} & answers(here).keys()  # what had answered was not run again


def test_killed_in_trial_3_it_runs_that_config_again_exactly_once(here: Path) -> None:
    command = grid(here, fake_seconds=0.15)
    killed_when(here, command, here / TRIALS / "3" / "progress.json", "warmup")
    assert_nothing_left(here)
    before = shown(here)
    assert [trial["state"] for trial in before["trials"]] == ["COMPLETE"] * 3 + ["RUNNING"]
    assert before["budget"]["used_seconds"] > 3 * 0.15

    code, out, err = run(here, *command)
    assert code == 0, err
    after = json.loads(out)
    assert after["trials"][:3] == before["trials"][:3]
    assert after["budget"]["used_seconds"] > before["budget"]["used_seconds"]
    lost = after["trials"][3]
    assert (lost["state"], lost["stopped"]["reason"]) == ("FAIL", "lost")
    assert lost["config"] == before["trials"][3]["config"]
    searched = [trial for trial in after["trials"] if trial["role"] != "confirm"]
    runs = Counter(name_of(trial) for trial in searched)
    assert [trial["state"] for trial in searched if trial["config"] == lost["config"]] == ["FAIL", "COMPLETE"]
    assert sorted(runs.values()) == [1] * (N_TRIALS - 1) + [2]
    assert states(after) == {"COMPLETE", "FAIL"}


def test_a_config_lost_several_times_in_a_row_is_measured_in_the_end(here: Path) -> None:
    command = words(here, "--budget", "60s", "--trials", 3, "--json", fake_seconds=0.15)
    for number in range(1, 5):
        killed_when(here, command, here / TRIALS / str(number) / "progress.json", "warmup")
    code, out, err = run(here, *command)
    assert code == 0, err
    trials = [trial for trial in json.loads(out)["trials"] if trial["role"] != "confirm"]
    assert [trial["state"] for trial in trials] == ["COMPLETE", *["FAIL"] * 4, *["COMPLETE"] * 2]
    assert len({name_of(trial) for trial in trials[1:6]}) == 1


def test_what_a_killed_study_left_running_is_ended_by_the_next(here: Path) -> None:
    """Children with sessions of their own, of a slice that does not end them when its parent is gone."""
    options = {"fake": "hang_with_children", "fake_when": "scope=layer", "fake_once": True}
    command = words(here, "--budget", "60s", "--trials", 2, "--json", **options)
    killed_when(here, command, here / TRIALS / "1" / "progress.json", "warmup")
    wait(lambda: len(processes_of(here)) == 2)
    code, _, err = run(here, *command)
    assert code == 0, err
    assert_nothing_left(here)


@pytest.mark.timeout(400)
def test_real_slices_killed_while_they_train_compile_and_measure(here: Path, inductor_seed: Path) -> None:  # noqa: F811
    shutil.copytree(inductor_seed, here / "studies" / ".seed")
    (here / "scopes.yaml").write_text(SCOPES)
    (here / "study.yaml").write_text(yaml.safe_dump(REAL))
    (here / "python").write_text(PYTHON)
    (here / "python").chmod(0o755)
    command = ["tune", "--spec", "study.yaml", "--study", STUDY, "--python", str(here / "python"), "--json"]
    killed_when(here, command, here / TRIALS / "0" / "log.txt", "warmup")
    assert_nothing_left(here)
    with started(here, command) as process:
        wait(lambda: (here / TRIALS / "2").exists() and any("cc1plus" in line for line in processes_of(here)))
        process.kill()
        process.wait(10)
    assert_nothing_left(here)
    known = finished(here)
    assert [record.state.value for record in known.values()] == ["FAIL", "COMPLETE"]
    killed_when(here, command, here / TRIALS / "3" / "log.txt", "measure")
    assert_nothing_left(here)

    code, out, err = run(here, *command)
    assert code == 0, err
    assert_nothing_left(here)
    assert known.items() <= finished(here).items()
    trials = json.loads(out)["trials"]
    assert [(trial["config"]["scope"], trial["state"]) for trial in trials] == [
        ("none", "FAIL"),
        ("none", "COMPLETE"),
        ("layer", "FAIL"),
        ("layer", "FAIL"),
        ("layer", "COMPLETE"),
    ]
    assert trials[-1]["telemetry"]["compile_applied"] == "all"
    assert (here / FOLDER / "best.yaml").exists()
