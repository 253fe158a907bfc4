"""What a search-space file may say: every complaint about one, with the place it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import yaml

from autocompile.knob_table import KNOBS, coerce, problem
from autocompile.values import nearest, shown

Place: TypeAlias = tuple[str | int, ...]
Complaint: TypeAlias = tuple[Place, str]

# What conditions may name beside knobs, and the values it has; None where these are no list.
FACTS: dict[str, tuple[str, ...] | None] = {
    "device": ("cuda", "cpu"),
    "method": ("full", "lora", "qlora"),
    "precision": ("bf16", "bf16-mixed", "fp16-mixed", "fp32"),
    "world_size": None,
    "shapes": ("fixed", "varying"),
    "task": ("causal-lm", "masked-lm", "classification", "image-classification"),
    "gpu_capability": None,
}
_SPACE = ("format", "parameters")
_CHOICES = ("choices", "default", "why")
_RANGE = ("low", "high", "scale", "default", "why")
_BLOCK = ("choices", "low", "high", "scale", "default", "when", "why")
_SCALES = ("log2", "linear")


def complaints(data: object) -> Iterator[Complaint]:
    """All that is wrong with this data of a file, outermost first; what follows the first may stumble over it."""
    if not isinstance(data, dict):
        yield (), f"expected a mapping with format and parameters, found {shown(data)}"
        return
    yield from _unknown_keys((), data, _SPACE)
    yield from _missing_keys((), data, _SPACE)
    if type(data["format"]) is not int or data["format"] != 1:
        yield ("format",), f"expected 1, found {shown(data['format'])}"
    if not isinstance(data["parameters"], dict):
        yield ("parameters",), f"expected a mapping from knobs to blocks, found {shown(data['parameters'])}"
    for name, blocks in data["parameters"].items():
        if name not in KNOBS:
            yield ("parameters", name), f"unknown knob {shown(name)}; {nearest(str(name), KNOBS)}"
        if blocks == [] or blocks == ():
            yield ("parameters", name), "expected a block or a list of blocks, found an empty list"
        for path, block in _blocks(name, blocks):
            yield from _block_complaints(path, name, block)


def coerced(data: dict[str, Any]) -> dict[str, Any]:
    """The same with a list of blocks under each name, and with what YAML reads as another type as it is meant."""
    parameters = {
        name: [_coerced_block(name, block) for _, block in _blocks(name, blocks)]
        for name, blocks in data["parameters"].items()
    }
    return {**data, "parameters": parameters}


def in_words(path: Place, message: str) -> str:
    where = ".".join(str(part) for part in path)
    return f"{where}: {message}" if where else message


def line_of(node: yaml.Node | None, path: Place) -> int:
    """The line of the deepest node on this path that the file holds."""
    line = 1
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                break
            line, node = found[-1][0].start_mark.line + 1, found[-1][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _blocks(name: str, blocks: object) -> Iterator[tuple[Place, Any]]:
    """Each block of a parameter with its path in the file."""
    if isinstance(blocks, list | tuple):
        yield from ((("parameters", name, index), block) for index, block in enumerate(blocks))
    else:
        yield ("parameters", name), blocks


def _unknown_keys(path: Place, data: Mapping[object, object], known: tuple[str, ...]) -> Iterator[Complaint]:
    for key in data:
        if key not in known:
            yield (*path, str(key)), f"unknown key {shown(key)}; {nearest(str(key), known)}"


def _missing_keys(path: Place, data: Mapping[str, object], wanted: tuple[str, ...]) -> Iterator[Complaint]:
    missing = [key for key in wanted if key not in data]
    if missing:
        yield path, f"expected {_and(missing)}, found {f'only {_and(list(data))}' if data else 'an empty mapping'}"


def _block_complaints(path: Place, name: str, block: object) -> Iterator[Complaint]:
    if not isinstance(block, dict):
        yield (
            path,
            f"expected a mapping with choices, or low, high and scale, and default and why, found {shown(block)}",
        )
        return
    yield from _unknown_keys(path, block, _BLOCK)
    yield from _shape_complaints(path, name, block)
    yield from _choice_complaints(path, name, block) if "choices" in block else _range_complaints(path, block)
    if wrong := problem(name, coerce(name, block["default"])) or _outside(name, block):
        yield (*path, "default"), wrong
    if "when" in block:
        yield from _condition_complaints((*path, "when"), block["when"])
    if not isinstance(block["why"], str) or not block["why"].strip():
        yield (*path, "why"), f"expected a sentence, found {shown(block['why'])}"


def _shape_complaints(path: Place, name: str, block: dict[str, Any]) -> Iterator[Complaint]:
    """A block lists choices or gives a range, and all that belongs to the one or the other."""
    ranged = [key for key in ("low", "high", "scale") if key in block]
    if "choices" in block and ranged:
        yield (*path, ranged[0]), f"expected choices or a range, found choices and {_and(ranged)}"
    if "choices" not in block and (not ranged or KNOBS[name].values is not None):
        ways = "choices" if KNOBS[name].values is not None else "choices, or low, high and scale"
        yield path, f"expected {ways}, found {f'only {_and(list(block))}' if block else 'an empty mapping'}"
    yield from _missing_keys(path, block, _CHOICES if "choices" in block else _RANGE)


def _choice_complaints(path: Place, name: str, block: dict[str, Any]) -> Iterator[Complaint]:
    values = block["choices"]
    yield from _list_complaints((*path, "choices"), values)
    for index, value in enumerate(values):
        if wrong := problem(name, coerce(name, value)):
            yield (*path, "choices", index), wrong
        if value in values[:index]:
            yield (*path, "choices", index), f"expected each choice once, found {shown(value)} again"


def _range_complaints(path: Place, block: dict[str, Any]) -> Iterator[Complaint]:
    for key in ("low", "high"):
        if not _whole(block[key]):
            yield (*path, key), f"expected a whole number from 1, found {shown(block[key])}"
    if block["high"] < block["low"]:
        yield (*path, "high"), f"expected {block['low']} (low) or more, found {block['high']}"
    if block["scale"] not in _SCALES:
        yield (*path, "scale"), f"expected {' or '.join(_SCALES)}, found {shown(block['scale'])}"


def _outside(name: str, block: dict[str, Any]) -> str | None:
    """What is wrong with a default that is legal for its knob, but no value of this block."""
    default = block["default"]
    if "choices" in block:
        values = [coerce(name, value) for value in block["choices"]]
        if coerce(name, default) in values:
            return None
        return f"expected one of the choices {', '.join(map(str, block['choices']))}, found {shown(default)}"
    low, high = block["low"], block["high"]
    if block["scale"] == "linear":
        return None if low <= default <= high else f"expected a whole number from {low} to {high}, found {default}"
    powers = [low << power for power in range((high // low).bit_length())]
    return None if default in powers else f"expected one of {', '.join(map(str, powers))}, found {default}"


def _condition_complaints(path: Place, when: object) -> Iterator[Complaint]:
    if not isinstance(when, dict):
        yield path, f"expected a mapping from knobs or facts to lists of values, found {shown(when)}"
        return
    for name, values in when.items():
        if name not in KNOBS and name not in FACTS:
            yield (*path, str(name)), f"unknown condition {shown(name)}; {nearest(str(name), [*KNOBS, *FACTS])}"
        yield from _list_complaints((*path, name), values)
        for index, value in enumerate(values):
            if wrong := _condition_problem(name, value):
                yield (*path, name, index), wrong


def _condition_problem(name: str, value: object) -> str | None:
    if name in KNOBS:
        return problem(name, coerce(name, value))
    known = FACTS[name]
    if known is not None:
        return None if value in known else f"expected one of {', '.join(known)}, found {shown(value)}"
    if name == "world_size":
        return None if _whole(value) else f"expected a whole number from 1, found {shown(value)}"
    legal = isinstance(value, float | str) and re.fullmatch(r"\d+\.\d", str(value))
    return None if legal else f"expected a compute capability such as 9.0, found {shown(value)}"


def _list_complaints(path: Place, values: object) -> Iterator[Complaint]:
    if not isinstance(values, list | tuple) or not values:
        yield path, f"expected a list of values, found {shown(values)}"


def _coerced_block(name: str, block: dict[str, Any]) -> dict[str, Any]:
    choices = {"choices": [coerce(name, value) for value in block["choices"]]} if "choices" in block else {}
    when = {other: [_meant(other, value) for value in values] for other, values in block.get("when", {}).items()}
    return {**block, **choices, "default": coerce(name, block["default"]), "when": when}


def _meant(name: str, value: object) -> object:
    """YAML reads a compute capability as a number."""
    return str(value) if name == "gpu_capability" else coerce(name, value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _and(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
