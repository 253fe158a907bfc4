"""What this machine has and what it lacks for tuning, found without importing torch: each finding says what to do."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

NEEDED = ("torch", "transformers", "peft", "accelerate", "optuna", "sqlalchemy", "alembic")
_OPTIONAL = {"bitsandbytes": "qlora", "deepspeed": "deepspeed"}  # and our extra that brings it
_DISK_BYTES = 1024**3  # as the preflight wants
_GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing. ``missing`` says what is wrong and what to do about it where tuning cannot work without it."""

    what: str
    found: str
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class Driver:
    """NVIDIA's, if it answers: its version, the CUDA it supports, and the names and (free, total) bytes of its GPUs."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[tuple[str, int, int], ...]


def python() -> Finding:
    return Finding(what="python", found=f"{sys.version.split()[0]} ({sys.executable})")


def packages() -> list[Finding]:
    return [*map(_needed, NEEDED), *(_optional(name, extra) for name, extra in _OPTIONAL.items())]


def triton(torch: str | None, found: str | None, requirements: Sequence[str]) -> Finding:
    """The one that this torch was built with, as its own requirements say; a torch for CPUs has none."""
    wanted = next((match[1] for line in requirements if (match := re.match(r"triton\s*==\s*([\w.]+)", line))), None)
    if torch is None or wanted is None:
        return Finding(what="triton", found=found or "not needed: this torch has none of its own")
    if found == wanted:
        return Finding(what="triton", found=f"{found}, as torch {torch} wants")
    said = f"torch {torch} wants triton {wanted}, found {found or 'none'}"
    return Finding(what="triton", found=found or "missing", missing=f"{said}: pip install triton=={wanted}")


def cuda_of(torch: str, requirements: Sequence[str]) -> tuple[int, int] | None:
    """The CUDA that this torch was built for; None where it is built for CPUs."""
    if match := re.search(r"\+cu(\d+)(\d)$", torch):
        return int(match[1]), int(match[2])
    pattern = r"(?:cuda-toolkit|nvidia-cuda-runtime)\b.*?==\s*(\d+)\.(\d+)"
    found = next((match for line in requirements if (match := re.match(pattern, line))), None)
    return (int(found[1]), int(found[2])) if found else None


def driver_finding(driver: Driver, torch: str | None, requirements: Sequence[str]) -> Finding:
    """Whether the driver runs what torch was built for: any CUDA of the same major version, or an older one."""
    supported = ".".join(map(str, driver.cuda))
    found = f"{driver.version}, for CUDA up to {supported}"
    built = cuda_of(torch, requirements) if torch else None
    if torch is None:
        return Finding(what="driver", found=found)
    if built is None:
        missing = f"torch {torch} is built for CPUs and cannot use the GPU: install one for CUDA {driver.cuda[0]}"
        return Finding(what="driver", found=found, missing=f"{missing} (pytorch.org, Get Started)")
    if built[0] > driver.cuda[0]:
        wanted = ".".join(map(str, built))
        missing = f"torch {torch} is built for CUDA {wanted} and the driver supports {supported}: update the driver"
        return Finding(what="driver", found=found, missing=f"{missing} or install a torch for CUDA {driver.cuda[0]}")
    return Finding(what="driver", found=found)


def gpus() -> list[Finding]:
    """The driver and each GPU; a machine without is tuned on its CPU."""
    driver = ask_driver()
    if isinstance(driver, Finding):
        return [driver]
    torch = installed("torch")
    devices = [_gpu(index, *gpu) for index, gpu in enumerate(driver.gpus)]
    return [driver_finding(driver, torch, requirements("torch")), *devices]


def ask_driver() -> Driver | Finding:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return Finding(what="GPU", found="none: no NVIDIA driver is installed; tuning runs on the CPU")
    except pynvml.NVMLError as error:
        said = f"the NVIDIA driver does not answer ({error})"
        missing = f"{said}: load it (modprobe nvidia) or restart after an update; in a container, pass the GPU through"
        return Finding(what="GPU", found="unknown", missing=missing)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [(_text(pynvml.nvmlDeviceGetName(one)), pynvml.nvmlDeviceGetMemoryInfo(one)) for one in handles]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Driver(
            version=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple((name, int(memory.free), int(memory.total)) for name, memory in found),
        )
    finally:
        pynvml.nvmlShutdown()


def compilers(*, gpu: bool) -> Iterator[Finding]:
    """Inductor runs $CXX, else g++, and nothing else; triton $CC, else gcc or clang. Both need Python's headers."""
    yield _compiler("C++ compiler", os.environ.get("CXX"), ("g++",), "CXX")
    if gpu:
        yield _compiler("C compiler", os.environ.get("CC"), ("gcc", "clang"), "CC")
    header = Path(sysconfig.get_path("include"), "Python.h")
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = f"{header} is missing, which compiled kernels include: install Python's headers (python{minor}-dev)"
    yield Finding(what="Python.h", found=str(header), missing=None if header.exists() else missing)


def cache_folder(studies: Path, *, gpu: bool) -> Finding:
    """Where compiled kernels are written and loaded from: the studies' folder, or what will hold it."""
    near = next(path for path in (studies.absolute(), *studies.absolute().parents) if path.exists())
    return Finding(what="cache folder", found=_free(near), missing=_complaint(near, studies.absolute(), gpu=gpu))


def _free(folder: Path) -> str:
    return f"{folder}, {shutil.disk_usage(folder).free / _GIB:.1f} GiB free"


def _complaint(near: Path, studies: Path, *, gpu: bool) -> str | None:
    elsewhere = "start in another folder or set cache_root in the study's spec"
    if not near.is_dir():
        return f"cache folder {near}: it is a file: move it away, or {elsewhere}"
    try:
        with tempfile.TemporaryFile(dir=near):
            pass
    except OSError as error:
        return f"cache folder {near}: cannot be written ({error.strerror}): {elsewhere}"
    if os.statvfs(near).f_flag & os.ST_NOEXEC:
        return f"cache folder {near}: its disk is mounted noexec, which compiled kernels cannot use: {elsewhere}"
    if not gpu and any(letter.isspace() for letter in str(studies)):
        return f"cache folder {studies}: torch cannot compile for a CPU where the path holds a blank: {elsewhere}"
    if shutil.disk_usage(near).free < _DISK_BYTES:
        return f"cache folder {near}: less than 1 GiB is free: delete something (`autocompile gc`), or {elsewhere}"
    return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def _needed(package: str) -> Finding:
    found = installed(package)
    missing = f"{package} is not installed: pip install {package}"
    return Finding(what=package, found=found or "missing", missing=None if found else missing)


def _optional(package: str, extra: str) -> Finding:
    found = installed(package) or f"not installed (optional: pip install 'torch-autocompile[{extra}]')"
    return Finding(what=package, found=found)


def _compiler(what: str, asked: str | None, usual: Sequence[str], variable: str) -> Finding:
    names = [asked] if asked else list(usual)
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found:
        return Finding(what=what, found=f"{found} ({variable}={asked})" if asked else found)
    if asked:
        missing = f"{variable}={asked} is no program that runs: unset {variable} or set it to a {what}"
    else:
        missing = f"no {what} found: install {usual[0]} (Debian: apt-get install {usual[0]}) or set {variable}"
    return Finding(what=what, found="missing", missing=missing)


def _gpu(index: int, name: str, free: int, total: int) -> Finding:
    found = f"{name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    used = "" if free > 0.9 * total else "; something else uses it, which disturbs measurements (see nvidia-smi)"
    return Finding(what=f"GPU {index}", found=f"{found}{used}")


def _text(value: object) -> str:
    """Older versions of the binding answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
