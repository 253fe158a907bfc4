"""``python -m autocompile.slice.server``: import torch once, then fork a slice for each request.

Its standard input is the control socket of `autocompile.executors.warm`: a request comes as JSON ``{folder,
environment}`` with two descriptors, the slice's connection and its log; over the connection go the slice's pid and,
when it ended, its exit status (negative: the signal's number). When the control socket closes, all that was forked is
ended.

What may not happen here before a fork: CUDA, an OpenMP loop or a backward pass, after which children fail or hang. A
probe finds that out; whoever started this runs slices in processes of their own then. What imports have opened, such as
NVML's files, stays open in a slice.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from autocompile.processes import MARK, end_tree, mark_of

_MODULES = (
    "autocompile.slice.preflight",
    "autocompile.slice.rank",
    "torch._inductor.compile_fx",
    "autocompile.workloads.models",
    "transformers.models.llama.modeling_llama",
)
_PROBE_SECONDS = 30.0
_MESSAGE_BYTES = 65_536


@dataclass(frozen=True)
class _Server:
    """Forks ``main(folder)``; ``running`` are the connections of slices that did not end, by pid, with their marks."""

    control: socket.socket
    main: Callable[[Path], None]
    alarm: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)  # of the end of a slice
    running: dict[int, tuple[socket.socket, str]] = field(default_factory=dict)

    def serve(self) -> None:
        heard, rung = self.alarm
        rung.setblocking(False)
        signal.set_wakeup_fd(rung.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.control.send(b"ready")
        while True:
            ready, _, _ = select.select([self.control, heard], [], [])
            if heard in ready:
                heard.recv(_MESSAGE_BYTES)
                self._tell_ended()
            if self.control in ready:
                message, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES, 2)
                if not message:
                    return
                self._fork(*descriptors, **json.loads(message))

    def end(self) -> None:
        for pid, (_, mark) in self.running.items():
            end_tree(pid, mark)

    def _fork(self, connection: int, log: int, *, folder: str, environment: dict[str, str | None]) -> None:
        mark = mark_of(os.fstat(log))
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes: the connection closes, and whoever asked is told by that
            os.close(log)
            os.close(connection)
            return
        if pid == 0:
            for inherited in (self.control, *self.alarm, *(other for other, _ in self.running.values())):
                inherited.close()
            _become_slice(connection, log, {**environment, MARK: mark})
            _run(lambda: self.main(Path(folder)))
        os.close(log)
        self.running[pid] = socket.socket(fileno=connection), mark
        self._tell(pid, pid)

    def _tell_ended(self) -> None:
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self.running:  # else an orphan of a slice, where this process is a container's first
                self._tell(pid, os.waitstatus_to_exitcode(status))
                self.running.pop(pid)[0].close()

    def _tell(self, pid: int, number: int) -> None:
        with suppress(OSError):  # where nobody listens any more
            self.running[pid][0].send(str(number).encode())


def _become_slice(connection: int, log: int, environment: dict[str, str | None]) -> None:
    """As if a shell had started it: a session, standard streams, signals and an environment of its own."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, source in enumerate((connection, log, log)):
        os.dup2(source, target)
    os.close(connection)
    os.close(log)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX")


def _run(work: Callable[[], object]) -> None:
    """To the end of this process, whatever happens; never back into the server's loop."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1
    except BaseException:  # noqa: BLE001  as the interpreter does with what nobody caught
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also where the disk is full
            os._exit(status)  # compile workers and CUDA contexts take seconds to say goodbye


def preload() -> None:
    """Import what most slices import; not peft beside bitsandbytes, which starts CUDA then."""
    for module in _MODULES:
        importlib.import_module(module)
    if importlib.util.find_spec("bitsandbytes") is None:
        importlib.import_module("peft")
    gc.collect()
    gc.freeze()  # else each child's collections would copy what they share


def probe() -> None:
    """Raises RuntimeError where a forked child cannot train: on the GPU if there is one, with OpenMP's threads."""
    nothing, said = os.open(os.devnull, os.O_RDWR), os.dup(2)
    pid = os.fork()
    if pid == 0:
        _become_slice(nothing, said, {})
        _run(_train_a_little)
    os.close(nothing)
    os.close(said)
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise RuntimeError("a forked child hangs")
        time.sleep(0.01)
    if status:
        raise RuntimeError("a forked child cannot train")


def _train_a_little() -> None:
    """On each kind of device, and ask a GPU's driver, as slices do."""
    import torch

    from autocompile.slice.environment import driver_major

    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        weight = torch.ones(256, 256, device=device, requires_grad=True)
        (weight @ weight).sum().backward()
    if torch.cuda.is_available():
        driver_major()


def _exit_when_abandoned(control: socket.socket, imported: threading.Event) -> None:
    """While imports keep the server from listening."""
    while not imported.wait(0.1):
        if select.select([control], [], [], 0)[0] and not control.recv(1, socket.MSG_PEEK):
            os._exit(1)


def main(run: Callable[[Path], None], load: Callable[[], None], check: Callable[[], None] = lambda: None) -> None:
    """Serve requests that come over standard input until it closes; ``check`` may fork, ``load`` may take its time."""
    control = socket.socket(fileno=os.dup(0))
    imported = threading.Event()
    watch = threading.Thread(target=_exit_when_abandoned, args=(control, imported))
    watch.start()
    try:
        load()
    finally:
        imported.set()
        watch.join()  # no thread may be there when a process forks
    check()
    server = _Server(control, run)
    try:
        server.serve()
    finally:
        server.end()


def _load() -> None:
    """With a variable that keeps torch from starting CUDA when an import asks for a GPU; slices do not get it."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    preload()
    os.environ.pop(name) if before is None else os.environ.update({name: before})


if __name__ == "__main__":
    from autocompile.slice.__main__ import main as run_slice

    main(run_slice, _load, probe)
