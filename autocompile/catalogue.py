"""Model architectures as data: what a model's name stands for, read without torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from autocompile.errors import UserError
from autocompile.values import Value, nearest

Source = Literal["catalogue", "directory", "hub"]


class Architecture(Value):
    """``config`` are arguments of transformers' config class for ``model_type``; ``hub`` is where weights are.

    ``labels`` are the classes that a classifier tells apart, ``sequence_length`` what it is trained with where nobody
    asks for another, ``space`` the search space of its family.
    """

    model_type: str
    task: str = "causal-lm"
    space: str = "default"
    sequence_length: int | None = None
    labels: int | None = None
    hub: str | None
    parameters: int = Field(ge=1)
    config: dict[str, Any]


@cache
def catalogue() -> dict[str, Architecture]:
    """Every architecture by name, in the order of the file."""
    raw = yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text())
    return {name: Architecture.model_validate(entry) for name, entry in raw.items()}


def tokenizer_of(model: str | None, asked: str | None) -> str | None:
    """Hub id or directory of the tokenizer asked for, else of the model's own; None where it has none."""
    entry = catalogue().get(model or "")
    return asked or (entry.hub if entry else model)


def source_of(model: str) -> Source:
    """Where a model of this name comes from; whether the Hub has it only the Hub knows.

    Raises UserError with the nearest names for what is neither in the catalogue, nor a directory, nor ORG/NAME.
    """
    if model in catalogue():
        return "catalogue"
    if Path(model).is_dir():
        return "directory"
    if model.count("/") == 1 and not model.startswith((".", "/", "~")) and not model.endswith("/"):
        return "hub"
    wanted = "expected a catalogue name, ORG/NAME or a directory"
    raise UserError(f'model: {wanted}, found "{model}"; {nearest(model, catalogue())}')
