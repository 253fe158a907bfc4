"""Disks, locks and servers that fail under a study: it waits, or ends with one line and goes on later."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from autocompile.records import State
from tests.acceptance.known_study import (
    MARK,
    TRIALS,
    Whole,
    assert_nothing_left,
    by_config,
    finished,
    grid,
    kept,
    last_line,
    place,
    states,
    undisturbed,
)
from tests.acceptance.test_commands import run, shown, started, wait_until
from tests.contract.test_storage import drop, running_server, throw_away


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the commands run."""
    folder = place(tmp_path)
    monkeypatch.setenv(MARK, str(folder))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return undisturbed(tmp_path_factory.mktemp("whole"))


# Disks


@pytest.fixture
def small_disk(here: Path) -> Iterator[Path]:
    """A disk of 4 MiB as the folder of the studies."""
    folder = here / "studies"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], timeout=20, check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@pytest.mark.parametrize("storage", ["sqlite:///studies/autocompile.db", "sqlite:///elsewhere.db"])
def test_a_disk_that_fills_up_ends_the_study_which_goes_on_when_there_is_room(
    here: Path, whole: Whole, small_disk: Path, storage: str
) -> None:
    command = grid(here, "--storage", storage, fake_seconds=0.1)
    with started(here, command) as process:
        wait_until((here / TRIALS / "2" / "progress.json").exists)
        with full(small_disk):
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, ""), err
    assert "full" in last_line(err) or "No space left" in last_line(err)
    assert_nothing_left(here)
    before = [trial for trial in shown(here, "--storage", storage)["trials"] if trial["state"] == "COMPLETE"]
    assert len(before) >= 2

    code, out, err = run(here, *command)
    assert code == 0, err
    after = json.loads(out)
    assert all(trial in after["trials"] for trial in before)
    assert "RUNNING" not in states(after)
    assert by_config(after) == by_config(whole.document)


def test_a_disk_full_from_the_start_is_one_line_and_leaves_no_study(here: Path, small_disk: Path) -> None:
    with full(small_disk):
        code, out, err = run(here, *grid(here))
        assert (code, out) == (3, ""), err
        assert "No space left" in last_line(err) or "full" in last_line(err)
    assert run(here, *grid(here, "--trials", 2))[0] == 0


def test_a_read_only_disk_is_one_line_and_the_study_goes_on_when_it_can_be_written(
    here: Path, small_disk: Path
) -> None:
    assert run(here, *grid(here, "--trials", 2))[0] == 0
    before = kept(here)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], timeout=20, check=True)
    code, out, err = run(here, *grid(here, "--trials", 3))
    assert (code, out) == (3, ""), err
    assert last_line(err).endswith("studies cannot be written)")
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], timeout=20, check=True)
    assert kept(here) == before
    assert run(here, *grid(here, "--trials", 3))[0] == 0
    assert kept(here)[: len(before)] == before


# Locks


@contextmanager
def locked(here: Path) -> Iterator[None]:
    """Another process writes to the database and does not come to an end."""
    with closing(sqlite3.connect(here / "studies" / "autocompile.db", isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


def test_a_locked_database_is_waited_for(here: Path, whole: Whole) -> None:
    with started(here, grid(here)) as process:
        wait_until((here / TRIALS / "2" / "progress.json").exists)
        with locked(here):
            time.sleep(3)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert states(document) == {"COMPLETE"}
    assert by_config(document) == by_config(whole.document)


def test_a_database_that_stays_locked_ends_the_study_which_goes_on_later(here: Path, whole: Whole) -> None:
    command = grid(here, "--storage", "sqlite:///studies/autocompile.db?timeout=1")
    with started(here, command) as process:
        wait_until((here / TRIALS / "2" / "progress.json").exists)
        with locked(here):
            began = time.monotonic()
            out, err = process.communicate(timeout=60)
            assert time.monotonic() - began < 10
    assert (process.returncode, out) == (3, ""), err
    assert last_line(err).endswith("database is locked")
    assert_nothing_left(here)
    before = finished(here)
    assert len(before) >= 2
    code, out, err = run(here, *command)
    assert code == 0, err
    assert before.items() <= finished(here).items()
    assert by_config(json.loads(out)) == by_config(whole.document)
    assert {record.state for record in kept(here)} <= {State.COMPLETE, State.FAIL}


# A server


def test_a_server_that_drops_all_connections_again_and_again_loses_nothing(here: Path, whole: Whole) -> None:
    server, rng = running_server(), random.Random(0)
    with throw_away(server) as url:
        with started(here, grid(here, "--storage", url)) as process:
            wait_until((here / TRIALS / "0").exists)
            for _ in range(20):
                drop(server, url)
                time.sleep(rng.uniform(0.0, 0.2))
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        document = json.loads(out)
        assert states(document) == {"COMPLETE"}
        assert by_config(document) == by_config(whole.document)
        assert {record.state for record in kept(here, url)} == {State.COMPLETE}


def test_a_server_that_is_started_again_is_waited_for(here: Path, whole: Whole) -> None:
    server = running_server()
    with throw_away(server) as url, server.connect() as connection:
        name = sa.make_url(url).database
        with started(here, grid(here, "--storage", url)) as process:
            wait_until((here / TRIALS / "2" / "progress.json").exists)
            connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            drop(server, url)
            time.sleep(3)
            connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        document = json.loads(out)
        assert states(document) == {"COMPLETE"}
        assert by_config(document) == by_config(whole.document)
