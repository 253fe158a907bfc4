"""Tell the parent where the slice is: progress.json at every change of stage and once a second."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

from autocompile.records import Progress, Stage
from autocompile.values import write_aside

_PERIOD_SECONDS = 0.5

log = logging.getLogger("autocompile.slice")


class Reporter:
    """Owns ``path``, the progress of one process; a context manager around a thread that rewrites it."""

    def __init__(self, path: Path, device: torch.device | None = None) -> None:
        self._path = path
        self._device = device  # each thread has a current one of its own, and this one's would be the first
        self._began = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._rewrite, daemon=True)
        self.stage = Stage.BUILD
        self._step = 0
        self._share = 0.0

    def __enter__(self) -> Reporter:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def enter(self, stage: Stage) -> None:
        self.stage = stage
        log.info("%6.1f s: %s", time.monotonic() - self._began, stage)
        self._write()

    def stepped(self) -> None:
        """One more optimizer step is done; the thread writes it down."""
        self._step += 1

    def memory_share(self) -> float:
        """How full the device was when it last answered, by the driver's count, 0 to 1; 0 on a CPU."""
        self._write()
        return self._share

    def _rewrite(self) -> None:
        while not self._stopped.wait(_PERIOD_SECONDS):
            self._write()

    def _write(self) -> None:
        reserved = used = None
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):  # after an illegal access every call fails, and that must not hide its cause
                free, total = torch.cuda.mem_get_info(self._device)
                reserved, used = torch.cuda.memory_reserved(self._device), total - free
                self._share = 1 - free / total
        progress = Progress(
            stage=self.stage,
            step=self._step,
            reserved_memory_bytes=reserved,
            device_memory_bytes=used,
            time=time.time(),
        )
        write_aside(self._path, progress.model_dump_json())
