"""How long the sequences of a workload are: a distribution by name, or a file of lengths or of texts, replayed."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autocompile.errors import UserError
from autocompile.values import read_text

SHORTEST = 2  # a language model needs a token to predict and one to predict it from
MOST_TEXTS = 256  # of a data set, its first; counting the tokens of all would take longer than a slice
_EXPECTED = "expected uniform:LOW-HIGH, lognormal:MEDIAN,SIGMA, a file with one length a line or a .jsonl of texts"


@dataclass(frozen=True)
class Uniform:
    """Every length from ``low`` to ``high`` is as likely."""

    low: int
    high: int

    def draw(self, pick: random.Random) -> int:
        return pick.randint(self.low, self.high)


@dataclass(frozen=True)
class Lognormal:
    """Most sequences are near the median and a few are many times as long, as in collections of texts."""

    median: float
    sigma: float

    def draw(self, pick: random.Random) -> int:
        return round(self.median * math.exp(pick.gauss(0.0, self.sigma)))


@dataclass(frozen=True)
class Listed:
    """The lengths of a data set in its order."""

    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """The first texts of a data set in its order, whose lengths a tokenizer tells."""

    texts: tuple[str, ...]


Lengths = Uniform | Lognormal | Listed | Texts


def parse_lengths(text: str) -> Lengths:
    """Raises UserError in one line for what is neither a distribution nor a readable file of lengths."""
    name, colon, numbers = text.partition(":")
    try:
        if name == "uniform" and colon:
            low, high = map(int, numbers.split("-"))
            if SHORTEST <= low <= high:
                return Uniform(low, high)
        elif name == "lognormal" and colon:
            median, sigma = map(float, numbers.split(","))
            if median >= SHORTEST and 0 < sigma <= 3:
                return Lognormal(median, sigma)
        elif Path(text).is_file():
            return _texts(Path(text)) if text.endswith(".jsonl") else _listed(Path(text))
    except (ValueError, OverflowError):
        pass
    if not colon and ("/" in text or "." in text):
        raise UserError(f"lengths: there is no file {text}")
    raise UserError(f'lengths: {_EXPECTED}, found "{text}"')


def _listed(path: Path) -> Listed:
    lengths = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        word = line.strip()
        if not word:
            continue
        if not word.isascii() or not word.isdigit() or int(word) < SHORTEST:
            raise UserError(f'lengths: {path}:{number}: expected a whole number from {SHORTEST}, found "{word}"')
        lengths.append(int(word))
    if not lengths:
        raise UserError(f"lengths: {path}: expected one length a line, found none")
    return Listed(tuple(lengths))


def _texts(path: Path) -> Texts:
    with path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        found = [_text(line, f"lengths: {path}:{number}") for number, line in itertools.islice(lines, MOST_TEXTS)]
    if not found:
        raise UserError(f"lengths: {path}: expected one JSON object a line, found none")
    return Texts(tuple(found))


def _text(line: bytes, where: str) -> str:
    """Of the fields that trainers of language models read: a text, a prompt with its completion, or a conversation."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: expected JSON: {error}") from error
    if isinstance(found, dict):
        parts = [found.get("text")]
        if "messages" in found and isinstance(found["messages"], list):
            parts = [one.get("content") if isinstance(one, dict) else None for one in found["messages"]]
        elif "text" not in found and "prompt" in found:
            parts = [found["prompt"], found.get("completion")]
        if parts and all(isinstance(part, str) for part in parts):
            return "\n".join(map(str, parts))
    raise UserError(
        f'{where}: expected an object with "text", "prompt" and "completion", or "messages" with their "content"'
    )


def epoch(lengths: Uniform | Lognormal | Listed, *, longest: int, seed: int, n: int) -> list[int]:
    """What a stream repeats, none above ``longest``: the first ``n`` of a file in order, of a distribution n draws."""
    pick = random.Random(seed)
    found = lengths.lengths[:n] if isinstance(lengths, Listed) else [lengths.draw(pick) for _ in range(n)]
    return [min(longest, max(SHORTEST, length)) for length in found]


def padded(longest: int, *, policy: str, limit: int) -> int:
    """How wide a batch is whose longest sequence has so many tokens; ``limit`` is the workload's sequence length."""
    if policy in ("fixed", "packed"):
        return limit
    if policy == "longest":
        return longest
    size = int(policy.removeprefix("bucket:"))
    return min(limit, math.ceil(longest / size) * size)


def packed(lengths: Sequence[int], *, limit: int) -> list[tuple[int, ...]]:
    """The sequences in their order, as many in a row as fit into ``limit`` tokens."""
    rows: list[tuple[int, ...]] = []
    for length in lengths:
        if rows and sum(rows[-1]) + length <= limit:
            rows[-1] = (*rows[-1], length)
        else:
            rows.append((length,))
    return rows
