"""Start, watch and end one process tree; nothing else in the package starts a program.

Covered: children of children, sessions and groups of their own (the ranks of torch's elastic launcher have them),
orphans whose parents died before the tree was ended, forks made while it is being ended. A tree is known by a mark in
its environment, by the log it writes, by descent and by session, read from /proc; without a /proc only the child's own
group is ended.
Not covered: a process that clears its environment and opens a session after its parent died, one in uninterruptible
sleep (a wedged GPU driver), one of another user. When this process itself is killed nothing here runs: each child sees
its standard input close and must end its tree, see `end_own_tree`; whoever comes next ends what did not, see
`end_abandoned`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MARK = "AUTOCOMPILE_TREE"
END_SECONDS = 5.0  # a killed process that is still there after this is in the kernel's hands
_LEAST_ROUNDS = 20  # of killing, however long a machine that stood still says they took
_PROC = Path("/proc")


class Tree:
    """One running child and all that it starts; made by `started`, or by whoever had it forked.

    ``wait`` takes seconds, collects the child, and says its exit status or None; ``close`` lets go of its standard
    input, which it watches.
    """

    def __init__(
        self, pid: int, mark: str, *, wait: Callable[[float], int | None], close: Callable[[], object]
    ) -> None:
        self.pid = pid
        self.wait = wait
        self._mark = mark
        self._close = close

    def end(self) -> None:
        """Kill whatever is left of the tree and collect the child. Harmless when repeated."""
        end_tree(self.pid, self._mark, pause=lambda: self.wait(0.01))
        if self.wait(0) is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(END_SECONDS)
        self._close()


@contextmanager
def started(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, stdin: int = subprocess.PIPE
) -> Iterator[Tree]:
    """Run this command in a session of its own, its output in ``log``; on leaving, the whole tree is ended.

    Raises OSError if the command cannot be executed or the log cannot be written.
    """
    with emptied(log) as output:
        mark = mark_of(os.fstat(output.fileno()))
        process = subprocess.Popen(
            command,
            stdin=stdin,  # held open: the slice exits when it closes
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: mark},
            start_new_session=True,
        )

    def wait(seconds: float) -> int | None:
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    tree = Tree(process.pid, mark, wait=wait, close=process.stdin.close if process.stdin else lambda: None)
    try:
        yield tree
    finally:
        tree.end()


def emptied(log: Path) -> BinaryIO:
    """Opened so that a log which is cut while it is written goes on at its new end."""
    log.write_bytes(b"")
    return log.open("ab")


def end_abandoned(log: Path) -> None:
    """End what still runs of the tree with this log, whose starter was killed. Harmless where nothing does."""
    try:
        mark = mark_of(log.stat())
    except OSError:  # it was never started
        return
    end_tree(None, mark)


def end_own_tree() -> None:
    """For a child whose starter is gone: end all that it started, sessions of their own included, and itself."""
    end_tree(os.getpid(), os.environ.get(MARK, "none"))
    os.killpg(0, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What /proc says of one process."""

    pid: int
    parent: int
    group: int
    session: int


def end_tree(root: int | None, mark: str, *, pause: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
    """Kill the tree, all but the process that asks for it."""
    deadline, rounds = time.monotonic() + END_SECONDS, 0
    while left := [pid for pid in members(root, mark) if pid != os.getpid()]:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # first nobody forks any more, then all go
            for pid in left:
                _send(pid, number)
        rounds += 1
        if rounds >= _LEAST_ROUNDS and time.monotonic() > deadline:
            break
        pause()


def members(root: int | None, mark: str) -> list[int]:
    """The living processes of the tree: marked, or in the root's group or session, and all who descend from those."""
    rows = list(_living())
    found = {row.pid for row in rows if root in (row.pid, row.group, row.session) or _has_mark(row.pid, mark)}
    while more := {row.pid for row in rows if row.pid not in found and {row.parent, row.session} & found}:
        found |= more
    return sorted(found)


def mark_of(log: os.stat_result) -> str:
    """Of the tree that writes this log: no other file has both numbers, and whoever finds the log finds the mark."""
    return f"{log.st_dev:x}-{log.st_ino:x}"


def _living() -> Iterator[_Row]:
    for folder in _PROC.glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(errors="replace")
        except OSError:  # it ended while we looked
            continue
        state, parent, group, session = text.rpartition(")")[2].split()[:4]  # the name before may hold blanks
        if state not in "ZX":
            yield _Row(pid=int(folder.name), parent=int(parent), group=int(group), session=int(session))


def _has_mark(pid: int, mark: str) -> bool:
    """In the environment it was started with, or by its output: what was forked shows another's environment."""
    folder = _PROC / str(pid)
    try:
        if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
            return True
        return mark_of((folder / "fd" / "1").stat()) == mark
    except OSError:  # it ended, or belongs to another user
        return False


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
