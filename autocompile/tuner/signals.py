"""SIGINT and SIGTERM as values: a signal may not raise in the middle of a write to the storage."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def signals(wake: SimpleQueue[T | None], stop: threading.Event | None = None) -> Iterator[list[int]]:
    """A list that grows with each signal, and an item in the queue that wakes whoever waits for it.

    ``stop`` is set too, for whoever looks at that instead.

    Only the main thread may ask for signals; elsewhere the list stays empty.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        wake.put(None)  # a SimpleQueue may be put to from a signal handler
        if stop is not None:
            stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
