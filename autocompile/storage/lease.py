"""Who may write a study: one process, known by host, boot, pid and start time, so that a dead one is told apart."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from autocompile.values import Value

SILENCE_SECONDS = 60.0  # after which a holder on another host may be dead
WATCH_SECONDS = 30.0  # a live one shows a new heartbeat within this time


class Holder(Value):
    """One process. ``process_start`` is in clock ticks since boot: a pid is given again, the two together are not.

    ``boot_id`` names the kernel's run and the pid namespace: only within these do pids mean the same.
    """

    host: str
    pid: int
    process_start: int
    boot_id: str


def this_process() -> Holder:
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()) or 0,
        boot_id=_boot_id(),
    )


def _boot_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return ""


def process_start(pid: int) -> int | None:
    """When this process started; None if it has ended, also if nobody has collected it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def is_live(holder: Holder, *, silent_seconds: float, here: Holder, start: int | None) -> bool | None:
    """``start`` is what `process_start` says of the holder's pid, asked on this host. None: nobody can tell yet.

    Hosts may share a name, and clocks may differ or jump, so that neither another boot of this host nor a heartbeat
    from long ago or from the future is proof of a death.
    """
    if (holder.host, holder.boot_id) == (here.host, here.boot_id):
        return holder.process_start == start
    return True if holder.host != here.host and 0 <= silent_seconds < SILENCE_SECONDS else None
