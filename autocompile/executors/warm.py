"""Fork slices from a process that has imported torch already, instead of starting an interpreter for each.

What a fresh process imports takes it 3 to 20 s, and a fork nothing. The other side is `autocompile.slice.server`. Where
that cannot be, each slice is started as before.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autocompile.processes import Tree, emptied, mark_of, started

_START_SECONDS = 60.0  # imports on a slow disk
_PID_SECONDS = 30.0
_TICK_SECONDS = 0.05
_LEAST_SECONDS = 1e-3  # none at all would mean never to wait, which sockets tell in another way
_MESSAGE_BYTES = 64
_GONE = "the process that forks slices is gone"

log = logging.getLogger("autocompile.slice")


@dataclass(frozen=True, kw_only=True)
class _Running:
    control: socket.socket
    tree: Tree
    environment: Mapping[str, str]
    resources: ExitStack


class ForkServer:
    """Starts the server at the first request, and again when it was killed."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._refused = sys.platform != "linux"  # elsewhere a forked child may not use what the system started

    def start(self, environment: Mapping[str, str], stop: threading.Event) -> bool:
        """Unless it runs: takes as long as its imports. Whether slices can be forked then."""
        with self._lock:
            if self._running is not None and self._running.tree.wait(0) is not None:
                self._end()
            if self._running is None and not self._refused and not stop.is_set():
                self._start(environment, stop)
            return self._running is not None

    @contextmanager
    def forked(self, folder: Path, *, environment: Mapping[str, str], log: Path) -> Iterator[Tree]:
        """The slice of this folder, its output in ``log``; on leaving, its whole tree is ended.

        The environment may differ from the server's own in what is read after imports. Raises OSError where the server
        is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, emptied(log) as output:
            mark = mark_of(os.fstat(output.fileno()))
            with theirs:
                server = self._ask(folder, environment, (theirs.fileno(), output.fileno()))
            tree = Tree(_pid(ours), mark, wait=_told_by(ours, server), close=ours.close)
            try:
                yield tree
            finally:
                tree.end()

    def close(self) -> None:
        """End the server and all that it forked; a later request starts another."""
        with self._lock:
            self._end()

    def _start(self, environment: Mapping[str, str], stop: threading.Event) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as stack:
            stack.callback(ours.close)
            command = [self._python, "-m", "autocompile.slice.server"]
            with theirs, suppress(OSError):  # who starts the slice itself will say why it cannot be started
                with tempfile.TemporaryDirectory(prefix="autocompile-") as folder:
                    said = Path(folder, "log.txt")
                    tree = stack.enter_context(
                        started(command, environment=environment, log=said, stdin=theirs.fileno())
                    )
                    words = stack.enter_context(said.open(errors="replace"))
                # its log has no name any more, so that nothing is left of it whoever is killed
                if _answers(ours, tree, stop):
                    self._running = _Running(
                        control=ours, tree=tree, environment=environment, resources=stack.pop_all()
                    )
                    return
                log.debug("each slice starts an interpreter of its own, since none can be forked: %s", words.read())
            self._refused = not stop.is_set()

    def _end(self) -> None:
        if self._running is not None:
            self._running.resources.close()
        self._running = None

    def _ask(self, folder: Path, environment: Mapping[str, str], descriptors: tuple[int, int]) -> Tree:
        with self._lock:
            if (running := self._running) is None:
                raise BrokenPipeError(_GONE)
            names = {*running.environment, *environment}
            values = {name: environment.get(name) for name in names}
            changed = {name: value for name, value in values.items() if value != running.environment.get(name)}
            message = json.dumps({"folder": str(folder.absolute()), "environment": changed})
            socket.send_fds(running.control, [message.encode()], descriptors)
            return running.tree


def _answers(control: socket.socket, tree: Tree, stop: threading.Event) -> bool:
    control.settimeout(_TICK_SECONDS)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and not stop.is_set():
        try:
            return bool(control.recv(_MESSAGE_BYTES))
        except TimeoutError:
            if tree.wait(0) is not None:
                return False
    return False


def _pid(connection: socket.socket) -> int:
    connection.settimeout(_PID_SECONDS)
    message = connection.recv(_MESSAGE_BYTES)
    if not message:
        raise BrokenPipeError(_GONE)
    return int(message)


def _told_by(connection: socket.socket, server: Tree) -> Callable[[float], int | None]:
    """Waits for the slice's exit status; when the server is gone nobody will tell it, which counts as hung up."""
    found: list[int] = []

    def wait(seconds: float) -> int | None:
        if not found:
            connection.settimeout(max(seconds, _LEAST_SECONDS))
            try:
                found.append(int(connection.recv(_MESSAGE_BYTES) or -signal.SIGHUP))
            except TimeoutError:
                if server.wait(0) is None:
                    return None
                found.append(-signal.SIGHUP)
        return found[0]

    return wait
