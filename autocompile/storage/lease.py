"""Who may write a study: one process, known by host, pid, start time and boot, so that a dead one is told apart."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from autocompile.values import Value

SILENCE_SECONDS = 60.0  # after which a holder on another host counts as dead


class Holder(Value):
    """One process. ``process_start`` is in clock ticks since boot: a pid is given again, the two together are not."""

    host: str
    pid: int
    process_start: int
    boot_id: str


def this_process() -> Holder:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()) or 0,
        boot_id=boot_id.read_text().strip() if boot_id.exists() else "",
    )


def process_start(pid: int) -> int | None:
    """When this process started; None if it has ended, also if nobody has collected it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def is_live(holder: Holder, *, silent_seconds: float, here: Holder, start: int | None) -> bool:
    """``start`` is what `process_start` says of the holder's pid, asked on this host."""
    if holder.host != here.host:
        return silent_seconds < SILENCE_SECONDS
    return holder.boot_id == here.boot_id and holder.process_start == start
