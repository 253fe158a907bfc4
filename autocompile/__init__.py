"""Measure whether torch.compile pays for a training, and with which settings; public names load when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autocompile.api import tune
    from autocompile.applied import apply
    from autocompile.best_file import load
    from autocompile.errors import ConfigMismatch
    from autocompile.tuner import StudyResult
    from autocompile.workloads.job import Context, Job

__version__ = "0.1.0"
__all__ = ["ConfigMismatch", "Context", "Job", "StudyResult", "__version__", "apply", "load", "tune"]

_HOMES = {
    "ConfigMismatch": "autocompile.errors",
    "Context": "autocompile.workloads.job",
    "Job": "autocompile.workloads.job",
    "StudyResult": "autocompile.tuner",
    "apply": "autocompile.applied",
    "load": "autocompile.best_file",
    "tune": "autocompile.api",
}


def __getattr__(name: str) -> Any:
    """PEP 562: `import autocompile` alone imports neither torch nor a database."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
