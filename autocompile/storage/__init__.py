"""Where studies live: Optuna's own study beside our tables, in one SQLite file or PostgreSQL database."""

from __future__ import annotations

from autocompile.storage.database import exists
from autocompile.storage.store import Storage, StoredStudy

__all__ = ["Storage", "StoredStudy", "exists"]
