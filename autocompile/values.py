"""What every data type here shares: immutability, strict fields, JSON, a stable hash, and reading what users write."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, wraps
from operator import is_
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import yaml
from pydantic import BaseModel, ConfigDict

from autocompile.errors import UserError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TOKENS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Value(BaseModel):
    """Immutable data, built by keyword; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def remembered(n_answers: int) -> Callable[[Callable[[*Ts], T]], Callable[[*Ts], T]]:
    """Let a pure function answer again what it was asked last about the very same immutable values.

    They are compared by identity: to hash a study's whole content would cost more than most answers.
    """

    def decorate(function: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
        @lru_cache(maxsize=n_answers)
        def answer(same: _Same) -> T:
            return function(*same.values)

        @wraps(function)
        def ask(*values: *Ts) -> T:
            return answer(_Same(values))

        return ask

    return decorate


@dataclass(frozen=True, eq=False)
class _Same:
    values: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.values)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and all(map(is_, self.values, other.values))


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


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a complaint about an unknown name: the nearest known names, or all of them."""
    names = {one.lower(): one for one in known}
    close = [names[found] for found in difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names.values())}"


def shown(value: object) -> str:
    """A value of a YAML file in a complaint: short, and on one line whatever it is."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list" if value else "an empty list"
    return str(value)


def read_text(path: Path) -> str:
    """The text of a user's file; UserError where it cannot be read or is no UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: expected UTF-8 text, found byte 0x{data[error.start]:02x}") from error


def parse_yaml(text: str, *, source: str) -> Any:
    """The plain data of one YAML document; UserError with ``source:line:`` where it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}:{line}: not YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{source}:{line}: not YAML: expected text, found character U+{error.character:04X}") from error
    except ValueError as error:  # a date such as 2026-02-30
        raise UserError(f"{source}: not YAML: {error}") from error


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


def major_minor(version: str | None) -> str | None:
    """``2.13`` of ``2.13.0+cu130``: the part of a version that a best config depends on."""
    return ".".join(version.split("+")[0].split(".")[:2]) if version else None
