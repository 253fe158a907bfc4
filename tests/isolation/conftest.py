"""What tests that compile share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".cache"
PROBE = "import torch._inductor.cpu_vec_isa as isa; isa.valid_vec_isa_list()"


@pytest.fixture(scope="session")
def inductor_seed() -> Path:
    """An inductor cache that holds only the probe of the CPU's vector instructions (14 s); kept in .cache."""
    seed = CACHE / f"inductor-seed-{version('torch')}"
    if not seed.is_dir():
        CACHE.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(made)}
        subprocess.run([sys.executable, "-c", PROBE], env=environment, check=True, timeout=300)
        try:
            made.rename(seed)
        except OSError:  # another test worker was faster
            shutil.rmtree(made)
    return seed
