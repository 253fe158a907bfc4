"""Where a study is kept and what runs its slices, unless the user says otherwise."""

from __future__ import annotations

import sys
from dataclasses import dataclass

STORAGE = "sqlite:///studies/autocompile.db"
STUDIES = "studies"  # the folder, under the working directory


@dataclass(frozen=True, kw_only=True)
class Place:
    """No part of what makes a study another one. ``gpus`` are indices among the visible ones, all if empty."""

    study: str | None = None
    storage: str = STORAGE
    python: str = sys.executable
    gpus: tuple[int, ...] = ()
