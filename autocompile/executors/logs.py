"""Keep a slice's log from filling the disk: its beginning says what was asked, its end what went wrong."""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 16 * 1024**2
KEPT_BYTES = 1024**2  # of each end


def shorten(log: Path) -> None:
    """Where the log has grown too long, in place: its writer goes on at the end, since it appends.

    What is written in the moment of the cut may be lost. Nothing where the disk does not take even that.
    """
    try:
        n_bytes = log.stat().st_size
        if n_bytes <= MOST_BYTES:
            return
        with log.open("r+b") as file:
            file.seek(n_bytes - KEPT_BYTES)
            end = file.read(KEPT_BYTES)
            left_out = n_bytes - KEPT_BYTES - len(end)
            file.truncate(KEPT_BYTES)
            file.seek(0, os.SEEK_END)
            file.write(f"\n[... {left_out} bytes left out ...]\n".encode() + end)
    except OSError:
        return
