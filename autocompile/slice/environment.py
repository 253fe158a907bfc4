"""What a measurement depends on besides its config: the device, the versions, the user's own file."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from autocompile.lengths import parse_lengths
from autocompile.spec import WorkloadSpec
from autocompile.values import digest

LIBRARIES = ("triton", "transformers", "peft", "accelerate", "bitsandbytes", "deepspeed")


def environment(device: torch.device, workload: WorkloadSpec | None = None) -> dict[str, str]:
    """Names and versions, of installed libraries only, and hashes of the user's files that the workload is made of."""
    found = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        found["driver"] = driver_major()
    else:
        found["cpu"] = cpu_name()
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    if workload is not None and workload.script is not None:
        found["workload"] = _hash(Path(workload.script.rpartition(":")[0]))
    if workload is not None and workload.lengths is not None and Path(workload.lengths).is_file():
        found["lengths"] = digest(repr(parse_lengths(workload.lengths)))[:16]  # what is used of it
    return found


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def cpu_name() -> str:
    """The processor's own name, or its architecture where it has none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def driver_major() -> str:
    # Imported here: it loads the driver's library, which machines without a GPU lack.
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion()).partition(".")[0]
    finally:
        pynvml.nvmlShutdown()
