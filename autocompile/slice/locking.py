"""One slice per GPU at a time, across studies: a file lock by the GPU's UUID."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch


@contextmanager
def gpu_lock(uuid: str) -> Iterator[None]:
    """Hold this GPU; waits for another slice to end. The lock goes with the process, however that ends."""
    path = Path(tempfile.gettempdir()) / f"autocompile-{uuid}.lock"
    try:
        handle = os.open(path, os.O_RDONLY)  # another user's will do: a lock needs no right to write
    except FileNotFoundError:
        handle = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def gpu_locks(count: int) -> Iterator[None]:
    """Hold the first so many visible GPUs, always taken in one order: else two slices could wait for each other."""
    with ExitStack() as stack:
        for uuid in sorted(str(torch.cuda.get_device_properties(index).uuid) for index in range(count)):
            stack.enter_context(gpu_lock(uuid))
        yield
