"""Slices forked from a warm process: each as if it had been started alone, and nothing left whoever dies."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autocompile.executors.local import LocalExecutor
from autocompile.executors.warm import ForkServer
from autocompile.records import Failed, FailureKind, Measured
from autocompile.slice import server
from autocompile.spec import Role
from tests.contract.fake_child import make_python
from tests.contract.test_executor import measure
from tests.isolation.test_processes import is_alive

ROOT = str(Path(__file__).parents[2])
# What each program does with the folder it is given, in a process that was forked for it
SERVE = """
import sys
sys.path.insert(0, {root!r})
from autocompile.slice.server import main
{program}
main(run, load)
"""
TELL = """
import json, os, pathlib, signal
import stat
kept = open(os.devnull)
def load(): pass
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
def run(folder):
    os.fstat(kept.fileno())  # what imports opened, such as a driver's files, stays open
    shown = {
        "environment": dict(os.environ), "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
        "group": os.getpgid(0), "sockets": [fd for fd in range(100) if is_socket(fd)],
        "child": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
    }
    (folder / "shown.json").write_text(json.dumps(shown))
    print("said", flush=True)
"""
SLEEP = """
import time
def load(): pass
def run(folder):
    print("asleep", flush=True)
    time.sleep(600)
"""
SLOW_IMPORT = """
import time
def load(): time.sleep(600)
run = None
"""


def python(folder: Path, program: str) -> str:
    path = folder / "python"
    code = folder / "serve.py"
    code.write_text(SERVE.format(root=ROOT, program=program))
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -S {code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "trial"
    path.mkdir()
    return path


def test_a_fork_looks_as_if_it_was_started_alone(tmp_path: Path, folder: Path) -> None:
    forks = ForkServer(python(tmp_path, TELL))
    environment = {**os.environ, "GONE": "soon", "TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    assert forks.start(environment, threading.Event())
    own = {name: value for name, value in environment.items() if name != "GONE"}
    own |= {"TORCHINDUCTOR_CACHE_DIR": "/here", "CUDA_VISIBLE_DEVICES": "1"}
    parents = set()
    for _ in range(2):
        with forks.forked(folder, environment=own, log=folder / "log.txt") as tree:
            assert tree.wait(10) == 0
        shown = json.loads((folder / "shown.json").read_text())
        parents.add(shown["parent"])
        assert shown["pid"] == shown["session"] == shown["group"] == tree.pid
        assert shown["sockets"] == [0]
        assert shown["child"]
        seen = shown["environment"]
        assert (seen["TORCHINDUCTOR_CACHE_DIR"], seen["CUDA_VISIBLE_DEVICES"]) == ("/here", "1")
        assert "GONE" not in seen
        assert (folder / "log.txt").read_text() == "said\n"
    assert len(parents) == 1 and parents != {os.getpid()}
    forks.close()
    assert not any(is_alive(pid) for pid in parents)


def test_two_run_beside_each_other_and_end_alone(tmp_path: Path, folder: Path) -> None:
    forks = ForkServer(python(tmp_path, SLEEP))
    assert forks.start(os.environ, threading.Event())
    with forks.forked(folder, environment=os.environ, log=folder / "one.txt") as one:
        with forks.forked(folder, environment=os.environ, log=folder / "two.txt") as two:
            assert one.wait(0.1) is None
            os.kill(two.pid, signal.SIGSEGV)
            assert two.wait(10) == -signal.SIGSEGV
        assert one.wait(0.1) is None
    assert not is_alive(one.pid)
    forks.close()


def test_a_killed_server_costs_a_slice_and_no_more(tmp_path: Path, folder: Path) -> None:
    executor = LocalExecutor(make_python(tmp_path, warm=True), threading.Event())
    answers: list[object] = []
    slow = threading.Thread(target=lambda: answers.append(executor.run(measure(folder, fake="slow"), folder)))
    slow.start()
    while not (folder / "progress.json").is_file():
        time.sleep(0.01)
    (server_pid,) = (pid for pid in children_of(os.getpid()) if b"fake_child" in command(pid))
    (slice_pid,) = children_of(server_pid)
    os.kill(server_pid, signal.SIGKILL)
    slow.join(20)
    (answer,) = answers
    assert isinstance(answer, Failed) and answer.failure.kind is FailureKind.INFRASTRUCTURE
    assert not is_alive(slice_pid)
    assert isinstance(executor.run(measure(folder), folder), Measured)


def test_this_interpreter_can_fork_slices() -> None:
    forks = ForkServer(sys.executable)
    assert forks.start(os.environ, threading.Event())
    forks.close()


def test_a_confirmation_has_an_interpreter_of_its_own(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkServer, "start", lambda *_: pytest.fail("it would have been forked"))
    request = measure(folder).model_copy(update={"role": Role.CONFIRM})
    assert isinstance(LocalExecutor(make_python(tmp_path), threading.Event()).run(request, folder), Measured)


def test_a_child_that_cannot_say_its_last_words_ends_all_the_same() -> None:
    """On a full disk, say: it may never go on as its server."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    pid = os.fork()
    if pid == 0:
        sys.stdout = Full()
        server._run(lambda: None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_interpreter_that_cannot_fork_slices_starts_them(tmp_path: Path, folder: Path) -> None:
    executor = LocalExecutor(make_python(tmp_path), threading.Event())
    assert isinstance(executor.run(measure(folder), folder), Measured)


def test_an_interrupt_does_not_wait_for_imports(tmp_path: Path) -> None:
    forks, stop = ForkServer(python(tmp_path, SLOW_IMPORT)), threading.Event()
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    assert not forks.start(os.environ, stop)
    assert time.monotonic() - began < 10


KILLED = """
import os, sys, threading, time
from pathlib import Path
from autocompile.executors.warm import ForkServer
forks, folder = ForkServer({python!r}), Path({folder!r})
if {importing}:
    threading.Timer(1, lambda: os.kill(os.getpid(), 9)).start()
forks.start(os.environ, threading.Event())
with forks.forked(folder, environment=os.environ, log=folder / "log.txt"):
    while not (folder / "log.txt").read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("importing", [False, True])
def test_a_server_whose_user_was_killed_ends_with_all_it_forked(tmp_path: Path, folder: Path, importing: bool) -> None:
    program = KILLED.format(
        python=python(tmp_path, SLOW_IMPORT if importing else SLEEP), folder=str(folder), importing=importing
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while left := [pid for pid in running() if str(tmp_path).encode() in command(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("child", "complaint"),
    [
        pytest.param(lambda: time.sleep(600), "hangs", id="it hangs"),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGABRT), "cannot train", id="it crashes"),
        pytest.param(lambda: sys.exit("no"), "cannot train", id="it fails"),
    ],
)
def test_the_probe_finds_forks_that_cannot_train(
    monkeypatch: pytest.MonkeyPatch, child: object, complaint: str
) -> None:
    monkeypatch.setattr(server, "_train_a_little", child)
    monkeypatch.setattr(server, "_PROBE_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match=complaint):
        server.probe()


def children_of(parent: int) -> list[int]:
    return [
        pid for pid in running() if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent
    ]


def running() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and is_alive(int(name))]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
