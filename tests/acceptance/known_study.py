"""A study on the fake child whose every answer is known in advance, and ways to look at what became of it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autocompile.records import State, TrialRecord
from autocompile.search import canonical
from autocompile.storage import Storage, exists
from tests.acceptance.test_commands import FOLDER, STUDY, run, words
from tests.contract.fake_child import make_python

TRIALS = FOLDER / "trials"
N_TRIALS = 12
SPACE = """
format: 1
parameters:
  scope: {choices: [none, layer], default: none, why: a test}
  sdpa: {choices: [auto, math], default: auto, why: a test}
  micro_batch: {low: 1, high: 8, scale: log2, default: 4, why: a test}
"""
MARK = "AUTOCOMPILE_TEST"  # in the environment of all that a test starts: its folder


def place(parent: Path) -> Path:
    """A folder in which to run commands."""
    folder = parent / "here"
    folder.mkdir(parents=True)
    (folder / "space.yaml").write_text(SPACE)
    make_python(parent)
    return folder


def grid(here: Path, *more: object, **options: object) -> list[str]:
    """The command. Slices take a twentieth of a second each."""
    options = {"fake_seconds": 0.05, **options}
    return words(here, "--budget", "10m", "--trials", N_TRIALS, "--sampler", "grid", "--json", *more, **options)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The study as it is when nothing happens to it; ``answers`` are its outcome.json by config."""

    document: dict[str, Any]
    answers: dict[str, bytes]


def undisturbed(parent: Path) -> Whole:
    here = place(parent)
    code, out, err = run(here, *grid(here))
    assert code == 0, err
    document, found = json.loads(out), answers(here)
    assert len(by_config(document)) == N_TRIALS
    return Whole(document=document, answers={name_of(trial): found[trial["number"]] for trial in document["trials"]})


def kept(here: Path, url: str | None = None) -> list[TrialRecord]:
    """What the database holds, also while the study runs."""
    url = url or f"sqlite:///{here}/studies/autocompile.db"
    if not exists(url):
        return []
    with Storage.open(url) as storage:
        return storage.records(STUDY) if STUDY in storage.names() else []


def finished(here: Path) -> dict[int, TrialRecord]:
    return {record.number: record for record in kept(here) if record.state is not State.RUNNING}


def answers(here: Path) -> dict[int, bytes]:
    """outcome.json of each trial that has one, byte for byte."""
    return {int(path.parent.name): path.read_bytes() for path in (here / TRIALS).glob("*/outcome.json")}


def by_config(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What `show --json` prints of each measured config, but for its number: repeats shift those."""
    trials = [trial for trial in document["trials"] if trial["state"] == "COMPLETE" and trial["role"] != "confirm"]
    found = {name_of(trial): {**trial, "number": None} for trial in trials}
    assert len(found) == len(trials)  # nothing was measured twice
    return found


def name_of(trial: dict[str, Any]) -> str:
    return json.dumps(canonical(trial["config"]))


def states(document: dict[str, Any]) -> set[str]:
    return {trial["state"] for trial in document["trials"]}


def processes_of(here: Path) -> list[str]:
    """The command lines of all living processes that work here or were started by who did."""
    mark, found = f"{MARK}={here}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and (
                (process / "cwd").readlink().is_relative_to(here)
                or mark in (process / "environ").read_bytes().split(b"\0")
            ):
                found.append((process / "cmdline").read_text(errors="replace").replace("\0", " "))
        except OSError:  # it ended, or is another user's
            continue
    return found


def assert_nothing_left(here: Path) -> None:
    deadline = time.monotonic() + 10
    while (left := processes_of(here)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def last_line(err: str) -> str:
    """The one line in which the command says why it ended."""
    assert "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("autocompile: ")
    return line
