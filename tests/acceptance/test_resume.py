"""The same command on another search space, and a slice that would outlast the budget."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from autocompile.records import State
from tests.acceptance.known_study import (
    MARK,
    SPACE,
    assert_nothing_left,
    grid,
    kept,
    last_line,
    place,
    states,
)
from tests.acceptance.test_commands import FOLDER, STUDY, run, started, words


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the commands run."""
    folder = place(tmp_path)
    monkeypatch.setenv(MARK, str(folder))
    return folder


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        pytest.param("[auto, math, flash]", "was auto, math, is now auto, math, flash", id="a choice added"),
        pytest.param("[math, auto]", "was auto, math, is now math, auto", id="only reordered"),
    ],
)
def test_a_changed_space_is_refused_under_the_study_s_name_and_is_another_study_without(
    here: Path, changed: str, difference: str
) -> None:
    command = grid(here, "--trials", 2)
    assert run(here, *command)[0] == 0
    before = kept(here)
    (here / "space.yaml").write_text(SPACE.replace("[auto, math]", changed))
    code, out, err = run(here, *command)
    assert (code, out) == (2, "")
    assert last_line(err).endswith(f"sdpa in the space {difference}; give --study another name")
    unnamed = [word for word in command if word not in ("--study", STUDY)]
    assert run(here, *unnamed)[0] == 0
    assert len(list((here / "studies").glob("*/spec.yaml"))) == 2
    assert kept(here) == before
    assert {record.state for record in before} == {State.COMPLETE}


def test_a_second_trial_of_ten_minutes_does_not_outlast_the_budget(here: Path) -> None:
    command = words(here, "--budget", "25s", "--json", fake="slow", fake_when="scope=layer")
    began = time.monotonic()
    with started(here, command) as process:
        out, err = process.communicate(timeout=90)
    assert time.monotonic() - began < 25 + 15
    assert process.returncode == 0, err
    assert_nothing_left(here)
    document = json.loads(out)
    assert "RUNNING" not in states(document)
    second = document["trials"][1]
    assert (second["state"], second["stopped"]["reason"]) == ("FAIL", "budget")
    assert yaml.safe_load((here / FOLDER / "best.yaml").read_text())["config"]["scope"] == "none"
