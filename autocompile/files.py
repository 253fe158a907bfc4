"""Folders that may vanish or be written to while one looks at them: how much they hold, and how to be rid of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def size_of(path: Path) -> int:
    """Bytes on disk of a folder or file, links not followed; 0 where there is none."""
    try:
        stat = path.lstat()
        total = stat.st_blocks * 512
        if path.is_dir() and not path.is_symlink():
            with os.scandir(path) as entries:
                total += sum(size_of(Path(entry.path)) for entry in entries)
    except OSError:
        return 0
    return total


def delete_folder(folder: Path) -> None:
    """Out of the way at once, so that nobody sees a part of it, then gone. Harmless where there is none."""
    aside = folder
    with suppress(OSError):
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".autocompile_deleted."))
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
