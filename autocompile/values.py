"""What every data type here shares: immutability, strict fields, JSON, a stable hash, and parsing of amounts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from autocompile.errors import UserError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TOKENS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


class Value(BaseModel):
    """Immutable data, built by keyword; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def digest(value: Any) -> str:
    """SHA-256 (hex) of the value's canonical JSON: keys sorted, no blanks, so equal values hash alike everywhere."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse_duration(text: str) -> float:
    """Seconds in ``90s``, ``30m``, ``2h``, ``1h30m`` or ``1d``; raises UserError for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise UserError(f'budget: expected a time such as 90s, 30m or 1h30m, found "{text}"')
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds <= 0:
        raise UserError(f'budget: expected more than zero seconds, found "{text}"')
    return seconds


def parse_tokens(text: str) -> int:
    """Number in ``50M``, ``1.5B``, ``200k`` or ``1000000``; raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbB]?)", text)
    if match is None or float(match[1]) <= 0:
        raise UserError(f'tokens: expected a number such as 50M or 200k, found "{text}"')
    return round(float(match[1]) * _TOKENS[match[2].lower()])


def parse_percent(text: str) -> float:
    """Fraction in ``8%`` (0.08); raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if match is None or float(match[1]) >= 100:
        raise UserError(f'memory headroom: expected a percentage such as 8%, found "{text}"')
    return float(match[1]) / 100


def write_aside(path: Path, text: str) -> None:
    """Write beside the file and rename, so that a reader sees the old text or the new one and never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
