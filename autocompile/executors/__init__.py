"""Turn a request into an answer: `Executor` is the seam, each file beside this one implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from autocompile.records import Answer
from autocompile.spec import SliceRequest

__all__ = ["Executor"]


class Executor(Protocol):
    """Runs one slice and always comes back with an answer; ``folder`` exists and is empty but for nothing else's files.

    ``Facts`` answer a preflight request, ``Measured`` a measure request, ``Failed`` either.
    """

    def run(self, request: SliceRequest, folder: Path) -> Answer: ...
