"""KEY=VALUE words: pinned knobs, fields of the workload, or a whole config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from autocompile.best_file import load
from autocompile.errors import UserError
from autocompile.knob_table import KNOBS, KnobValue, coerce, problem
from autocompile.spec import LoraSpec
from autocompile.values import nearest

_SETTABLE = ("mask", *(f"lora.{name}" for name in LoraSpec.model_fields))


def config_of(text: str, flag: str) -> dict[str, KnobValue]:
    """The config of a best-config file, or KEY=VALUE words with commas between them."""
    if not text:
        raise UserError(f"{flag}: expected a best-config file or KEY=VALUE,..., found nothing")
    if Path(text).suffix in (".yaml", ".yml") or "=" not in text:
        return dict(load(text).config)
    knobs, others = split_assignments(text.split(","), flag=flag)
    if others:
        raise UserError(f"{flag}: expected knobs of a config alone, found {next(iter(others))}")
    return knobs


def split_assignments(words: Sequence[str], *, flag: str = "--set") -> tuple[dict[str, KnobValue], dict[str, Any]]:
    """KEY=VALUE words as pinned knobs, and as fields of the workload."""
    pinned: dict[str, KnobValue] = {}
    lora: dict[str, KnobValue] = {}
    options: dict[str, KnobValue] = {}
    plain: dict[str, KnobValue] = {}
    seen: set[str] = set()
    for key, value in (_assignment(word, flag) for word in words):
        if key in seen:
            raise UserError(f"{flag} {key}: given twice")
        seen.add(key)
        family, _, name = key.partition(".")
        if key in KNOBS:
            pinned[key] = legal(f"{flag} {key}", key, value)
        elif family == "workload" and name:
            options[name] = value
        elif key not in _SETTABLE:
            raise UserError(f"{flag} {key}: unknown; {nearest(key, [*KNOBS, *_SETTABLE, 'workload.KEY'])}")
        elif family == "lora":
            lora[name] = value
        else:
            plain[key] = value
    groups = {"lora": lora, "options": options}
    return pinned, {**plain, **{name: group for name, group in groups.items() if group}}


def _assignment(word: str, flag: str) -> tuple[str, KnobValue]:
    """The value is read as YAML reads it, so `true`, 64 and 0.5 have their types; what YAML cannot read is text."""
    key, equals, text = word.partition("=")
    if not equals or not key or not text:
        raise UserError(f'{flag}: expected KEY=VALUE, found "{word}"')
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # a pattern such as *.q_proj is an alias to YAML, 2026-02-30 is no date
        value = text
    return key, value if isinstance(value, bool | int | float | str) else text


def legal(where: str, knob: str, value: KnobValue) -> KnobValue:
    """The value as its type is meant; UserError that begins with ``where`` if it is not the knob's."""
    found = coerce(knob, value)
    if wrong := problem(knob, found):
        raise UserError(f"{where}: {wrong}")
    assert isinstance(found, bool | int | float | str)
    return found
