"""`autocompile doctor`: what this machine has and what it lacks, without importing torch."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from autocompile.errors import MachineError

_NEEDED = ("torch", "transformers", "peft", "accelerate", "optuna", "sqlalchemy", "alembic")
_OPTIONAL = ("triton", "bitsandbytes", "deepspeed")
_DISK_BYTES = 1024**3  # as the preflight wants


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's. ``missing`` says what to do where tuning cannot work without it."""

    what: str
    found: str
    missing: str | None = None


def doctor() -> None:
    """Check this machine: Python, libraries, compiler, GPUs, disk."""
    from rich.console import Console
    from rich.table import Table

    findings = [
        _python(),
        *map(_needed, _NEEDED),
        *map(_optional, _OPTIONAL),
        _compiler(),
        *_gpus(),
        _disk(os.getcwd()),
    ]
    table = Table("what", "found")
    for finding in findings:
        table.add_row(finding.what, finding.found, style="red" if finding.missing else None)
    Console().print(table)
    if problems := [finding.missing for finding in findings if finding.missing]:
        raise MachineError("; ".join(problems))


def _python() -> Finding:
    return Finding(what="python", found=f"{sys.version.split()[0]} ({sys.executable})")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _needed(package: str) -> Finding:
    found = _installed(package)
    return Finding(what=package, found=found or "missing", missing=None if found else f"{package} is not installed")


def _optional(package: str) -> Finding:
    return Finding(what=package, found=_installed(package) or "not installed (optional)")


def _compiler() -> Finding:
    """Inductor takes $CXX, else g++; it needs one on GPUs too."""
    wanted = [os.environ[name] for name in ("CXX",) if name in os.environ]
    found = next((path for name in (*wanted, "g++", "clang++", "c++") if (path := shutil.which(name))), None)
    missing = None if found else "no C++ compiler found: install g++ (Debian: apt-get install g++)"
    return Finding(what="C++ compiler", found=found or "missing", missing=missing)


def _gpus() -> list[Finding]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [Finding(what="GPU", found=f"none ({error}); tuning runs on the CPU")]
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            Finding(what="driver", found=_text(driver)),
            *(
                _gpu(index, _text(pynvml.nvmlDeviceGetName(device)), pynvml.nvmlDeviceGetMemoryInfo(device))
                for index, device in enumerate(devices)
            ),
        ]
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, name: str, memory: object) -> Finding:
    free, total = (getattr(memory, field) / 1024**3 for field in ("free", "total"))
    return Finding(what=f"GPU {index}", found=f"{name}, {free:.1f} of {total:.1f} GiB free")


def _text(value: object) -> str:
    """Older versions of the binding answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _disk(folder: str) -> Finding:
    free = shutil.disk_usage(folder).free
    missing = None if free >= _DISK_BYTES else f"less than 1 GiB free in {folder}"
    return Finding(what="disk", found=f"{free / 1024**3:.0f} GiB free here", missing=missing)
