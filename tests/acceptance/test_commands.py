"""Studies as a user runs them: the real command in a process of its own, a fake child in place of torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.fake_child import make_python
from tests.contract.test_storage import running_server, throw_away

ROOT = Path(__file__).parents[2]
STUDY = "first"
FOLDER = Path("studies", STUDY)
SPACE = """
format: 1
parameters:
  scope: {choices: [none, layer], default: none, why: a test}
  micro_batch: {low: 2, high: 8, scale: log2, default: 4, why: a test}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder in which the commands run."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "space.yaml").write_text(SPACE)
    make_python(tmp_path)
    return folder


@pytest.fixture
def database() -> Iterator[str]:
    """A throw-away database on a PostgreSQL server."""
    with throw_away(running_server()) as made:
        yield made


def words(here: Path, *more: object, **options: object) -> list[str]:
    """`autocompile tune` with what every study here has; the options tell the fake child what to do."""
    settings = [word for name, value in options.items() for word in ("--set", f"workload.{name}={value}")]
    fixed = ("--workload", "job.py:build", "--search-space", "space.yaml", "--study", STUDY)
    return ["tune", *fixed, "--python", str(here.parent / "fake-python"), *settings, *map(str, more)]


@contextmanager
def started(here: Path, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "autocompile", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=here, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(here: Path, *arguments: str, timeout: float = 60) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with started(here, arguments) as process:
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out, err


def shown(here: Path, *more: str) -> dict[str, Any]:
    code, out, err = run(here, "show", STUDY, "--json", *more)
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_in(folder: Path) -> list[str]:
    """Living processes whose working directory this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text(errors="replace"))
        except OSError:  # it ended, or is another user's
            continue
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_before_the_study_leaves_nothing(here: Path, number: signal.Signals, code: int) -> None:
    before = sorted(os.listdir(here))
    with started(here, words(here, fake_preflight="hang")) as process:
        time.sleep(3)  # the preflight is waited for
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "interrupted; nothing was measured yet" in err
    assert sorted(os.listdir(here)) == before


def test_ctrl_c_saves_the_study_and_the_same_command_goes_on(here: Path) -> None:
    command = words(here, "--budget", "90s", "--trials", 6, "--json", fake_seconds=0.4)
    with started(here, command) as process:
        wait_until((here / FOLDER / "trials" / "2" / "progress.json").exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == f"autocompile: interrupted; study {STUDY} is saved, the same command goes on with it"
    assert not processes_in(here)
    assert yaml.safe_load((here / FOLDER / "best.yaml").read_text())["study"] == STUDY
    assert (here / FOLDER / "report.md").read_text().startswith(f"# {STUDY}\n")
    before = shown(here)["trials"]
    assert [trial["state"] for trial in before] == ["COMPLETE", "COMPLETE", "FAIL"]
    assert before[2]["stopped"]["reason"] == "interrupted"

    code, out, err = run(here, *command)
    assert code == 0, err
    document = json.loads(out)
    assert document["trials"][:3] == before
    assert document["verdict"]["result"] == "win"
    assert document["verdict"]["confirmed"]


def test_a_slice_of_ten_minutes_does_not_outlast_a_budget_of_twenty_seconds(here: Path) -> None:
    command = words(here, "--budget", "20s", "--json", fake="hang", fake_when="scope=layer")
    began = time.monotonic()
    code, out, err = run(here, *command)
    assert time.monotonic() - began < 20 + 15
    assert code == 0, err
    assert not processes_in(here)
    best = yaml.safe_load((here / FOLDER / "best.yaml").read_text())
    assert best["config"]["scope"] == "none"
    reasons = {trial["stopped"]["reason"] for trial in json.loads(out)["trials"] if trial["stopped"]}
    assert reasons == {"budget"}


def test_another_search_space_is_refused_with_the_difference(here: Path) -> None:
    command = words(here, "--budget", "60s", "--trials", 2)
    assert run(here, *command)[0] == 0
    before = shown(here)
    (here / "space.yaml").write_text(SPACE.replace("high: 8", "high: 16"))
    code, out, err = run(here, *command)
    assert (code, out) == (2, "")
    assert f"study {STUDY} exists with another spec" in err
    assert "micro_batch in the space was 2..8, is now 2..16" in err
    assert shown(here) == before


def test_what_show_prints_is_what_tune_printed(here: Path) -> None:
    code, out, err = run(here, *words(here, "--budget", "60s", "--trials", 3, "--json"))
    assert code == 0, err
    assert shown(here) == json.loads(out)


def test_a_study_in_postgresql_from_its_first_trial_to_its_end(here: Path, database: str) -> None:
    storage = ("--storage", database)
    code, out, err = run(here, *words(here, "--budget", "60s", "--trials", 2, "--json", *storage))
    assert code == 0, err
    first = json.loads(out)
    assert shown(here, *storage) == first
    assert not (here / "studies" / "autocompile.db").exists()

    code, out, err = run(here, *words(here, "--budget", "90s", "--trials", 4, "--json", *storage))
    assert code == 0, err
    more = json.loads(out)["trials"]
    assert more[: len(first["trials"])] == first["trials"]
    assert len(more) > len(first["trials"])

    code, out, _ = run(here, "studies", *storage)
    assert code == 0
    assert STUDY in out
    assert run(here, "report", STUDY, *storage)[1] == (here / FOLDER / "report.md").read_text()
    assert run(here, "rm", STUDY, "--yes", *storage)[0] == 0
    assert not (here / FOLDER).exists()
    assert run(here, "show", STUDY, *storage)[0] == 2
