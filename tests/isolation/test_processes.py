"""A process tree is ended whole, whatever its members did to get away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autocompile.processes import end_abandoned, started

# Each program starts one process that would outlive it by ten minutes, writes its pid, and does as its name says.
SLEEP = "import time; time.sleep(600)"
CHILD = f"""
import os, subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=NEW_SESSION, env=ENV)
print(started.pid, flush=True)
"""
ORPHAN = f"""
import os, subprocess, sys, time
between = subprocess.Popen([sys.executable, "-c", {CHILD.replace("NEW_SESSION", "True").replace("ENV", "None")!r}])
between.wait()
"""


def child(new_session: bool, env: str = "None") -> str:
    return CHILD.replace("NEW_SESSION", str(new_session)).replace("ENV", env)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(child(False) + "time.sleep(600)", id="a child in its group"),
        pytest.param(child(True) + "time.sleep(600)", id="a child in a session of its own"),
        pytest.param(child(True), id="a child in a session of its own, its parent gone"),
        pytest.param(ORPHAN + "time.sleep(600)", id="an orphan in a session of its own"),
        pytest.param(child(True, "{}") + "time.sleep(600)", id="a child without our environment in its own session"),
        pytest.param(child(False, "{}"), id="an orphan without our environment in the session"),
    ],
)
def test_nothing_of_a_tree_is_left(program: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with started([sys.executable, "-c", program], environment=os.environ, log=log) as tree:
        pid = int(wait_for_line(log))
        tree.wait(0.1)
        assert is_alive(pid)
    assert not is_alive(pid)
    assert not is_alive(tree.pid)


def test_a_tree_that_forks_while_it_is_ended_is_ended(tmp_path: Path) -> None:
    program = """
import os, time
print("ready", flush=True)
for _ in range(100):  # a chain of single forks that ends by itself: two at a time would double without end
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.02)
    else:
        time.sleep(60)
"""
    log = tmp_path / "log.txt"
    with started([sys.executable, "-c", program], environment=os.environ, log=log):
        wait_for_line(log)
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and is_alive(int(pid)) and has(int(pid), program)]


def test_a_bystander_lives(tmp_path: Path) -> None:
    sleeping = [sys.executable, "-c", SLEEP]
    with started(sleeping, environment=os.environ, log=tmp_path / "other.txt") as bystander:
        with started(sleeping, environment=os.environ, log=tmp_path / "log.txt"):
            pass
        assert is_alive(bystander.pid)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        pytest.param("raise SystemExit(7)", 7, id="exit status"),
        pytest.param("import os; os.kill(os.getpid(), 9)", -9, id="the signal that ended it"),
        pytest.param(SLEEP, None, id="it still runs"),
    ],
)
def test_wait_tells(program: str, status: int | None, tmp_path: Path) -> None:
    with started([sys.executable, "-c", program], environment=os.environ, log=tmp_path / "log.txt") as tree:
        assert tree.wait(0.2 if status is None else 10) == status


def test_standard_input_stays_open_until_the_end(tmp_path: Path) -> None:
    program = "import sys; print('ready', flush=True); sys.stdin.read(); print('closed', flush=True)"
    log = tmp_path / "log.txt"
    with started([sys.executable, "-c", program], environment=os.environ, log=log) as tree:
        wait_for_line(log)
        assert tree.wait(0.3) is None
    assert log.read_text() == "ready\n"


def test_a_child_sees_the_death_of_its_parent(tmp_path: Path) -> None:
    inner = "import sys, os; print(os.getpid(), flush=True); sys.stdin.read(); print('closed', flush=True)"
    log, outer_log = tmp_path / "inner.txt", tmp_path / "outer.txt"
    outer = f"""
import os, sys, time
from pathlib import Path
from autocompile.processes import started
with started([sys.executable, "-c", {inner!r}], environment=os.environ, log=Path({str(log)!r})):
    while not Path({str(log)!r}).read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with started([sys.executable, "-c", outer], environment=environment, log=outer_log) as tree:
        assert tree.wait(10) == -9
        deadline = time.monotonic() + 10
        while "closed" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert log.read_text().endswith("closed\n")


KILLED_STARTER = """
import os, time
from pathlib import Path
from autocompile.processes import started
log = Path({log!r})
with started([{python!r}, "-c", {program!r}], environment=os.environ, log=log):
    while "\\n" not in log.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


def kill_the_starter_of(program: str, folder: Path) -> Path:
    """The log of a program that prints the pid of a child of its own and whose starter was killed then."""
    log = folder / "log.txt"
    code = KILLED_STARTER.format(log=str(log), python=sys.executable, program=program)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, timeout=30, check=False)
    assert killed.returncode == -9
    return log


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(child(True) + "print(os.getpid(), flush=True); time.sleep(600)", id="it still runs"),
        pytest.param(child(True), id="only its child does, in a session of its own"),
    ],
)
def test_what_a_killed_starter_left_is_ended_by_who_knows_its_log(program: str, tmp_path: Path) -> None:
    log = kill_the_starter_of(program, tmp_path)
    pids = [int(line) for line in log.read_text().split()]
    with started([sys.executable, "-c", SLEEP], environment=os.environ, log=tmp_path / "other.txt") as bystander:
        assert is_alive(pids[0])
        for _ in range(2):
            end_abandoned(log)
            assert not any(is_alive(pid) for pid in pids)
        end_abandoned(tmp_path / "never.txt")
        assert is_alive(bystander.pid)


def test_a_child_whose_starter_was_killed_ends_with_its_own_children(tmp_path: Path) -> None:
    end = "from autocompile.processes import end_own_tree; sys.stdin.read(); end_own_tree()"
    log = kill_the_starter_of(child(True) + end, tmp_path)
    pid = int(wait_for_line(log))
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_no_such_program(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError),
        started(["/nonexistent/python"], environment=os.environ, log=tmp_path / "log.txt"),
    ):
        pass


def wait_for_line(log: Path) -> str:
    deadline = time.monotonic() + 20
    while "\n" not in (text := log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return text.splitlines()[0]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def has(pid: int, program: str) -> bool:
    try:
        return program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
