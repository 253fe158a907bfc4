"""What holds for every test: one thread per process, since OpenMP's waiting threads slow a shared machine tenfold."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here or in a child
