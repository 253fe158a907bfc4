"""Search spaces: which knobs vary, over which values, under which conditions; read strictly from YAML.

A config is one value per knob. Conditions (``when``) name other parameters or facts about the study; a knob whose
conditions do not hold keeps its default, so every config is complete.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from autocompile.errors import UserError
from autocompile.knob_table import KNOBS, KnobValue, coerce, is_pattern, problem
from autocompile.values import Value

Config: TypeAlias = Mapping[str, KnobValue]
Traits: TypeAlias = Mapping[str, KnobValue]
FACTS = ("device", "method", "parallel", "world_size", "shapes", "gpu_capability")


class Choices(Value):
    """A knob that takes one of the listed values."""

    choices: tuple[KnobValue, ...] = Field(min_length=1)
    default: KnobValue
    when: dict[str, tuple[KnobValue, ...]] = {}
    why: str = Field(min_length=1)

    def values(self) -> tuple[KnobValue, ...]:
        return self.choices


class Range(Value):
    """A knob that takes a whole number: every one from low to high, or low times the powers of two."""

    low: int = Field(ge=1)
    high: int = Field(ge=1)
    scale: Literal["log2", "linear"]
    default: KnobValue
    when: dict[str, tuple[KnobValue, ...]] = {}
    why: str = Field(min_length=1)

    def values(self) -> tuple[KnobValue, ...]:
        if self.scale == "linear":
            return tuple(range(self.low, self.high + 1))
        return tuple(self.low << power for power in range((self.high // self.low).bit_length()))

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.high < self.low:
            raise ValueError(f"expected high >= low, found {self.high} < {self.low}")
        return self


Parameter: TypeAlias = Choices | Range


class SearchSpace(Value):
    """Parameters by knob name; of several blocks under one name the first whose ``when`` holds counts."""

    format: Literal[1]
    parameters: dict[str, tuple[Annotated[Parameter, Field(union_mode="left_to_right")], ...]]

    @field_validator("parameters", mode="before")
    @classmethod
    def _one_block_is_a_list_of_one(cls, parameters: object) -> object:
        if not isinstance(parameters, dict):
            return parameters
        return {name: blocks if isinstance(blocks, list | tuple) else [blocks] for name, blocks in parameters.items()}

    @model_validator(mode="after")
    def _ordered_by_dependency(self) -> SearchSpace:
        order(self)
        return self


def order(space: SearchSpace) -> tuple[str, ...]:
    """Parameter names, each after those its conditions name; ValueError if they depend on each other in a circle."""
    done: list[str] = []
    while len(done) < len(space.parameters):
        ready = [
            name
            for name, blocks in space.parameters.items()
            if name not in done
            and all(other in done for block in blocks for other in block.when if other in space.parameters)
        ]
        if not ready:
            circle = sorted(set(space.parameters) - set(done))
            raise ValueError(f"the conditions of {', '.join(circle)} depend on each other in a circle")
        done += ready
    return tuple(done)


def defaults() -> dict[str, KnobValue]:
    """Every knob at its default: plain eager training."""
    return {name: knob.default for name, knob in KNOBS.items()}


def block_for(space: SearchSpace, name: str, known: Mapping[str, KnobValue]) -> tuple[int, Parameter] | None:
    """The first block of this parameter whose conditions hold for these traits and knob values, with its index."""
    for index, block in enumerate(space.parameters[name]):
        if all(_holds(known.get(other), wanted) for other, wanted in block.when.items()):
            return index, block
    return None


def _holds(value: KnobValue | None, wanted: tuple[KnobValue, ...]) -> bool:
    """In a condition, the pattern ``*`` stands for every scope that is a pattern."""
    return value in wanted or ("*" in wanted and value is not None and is_pattern(value))


def choose(
    space: SearchSpace, traits: Traits, pinned: Config, pick: Callable[[str, int, Parameter], KnobValue]
) -> Config:
    """A complete config: pinned knobs as they are, other active parameters as ``pick(name, block, parameter)`` says."""
    config = {**defaults(), **pinned}
    for name in order(space):
        if name not in pinned and (found := block_for(space, name, {**traits, **config})):
            config[name] = pick(name, *found)
    return config


def default_config(space: SearchSpace, traits: Traits, pinned: Config) -> Config:
    """The config of the space's own defaults."""
    return choose(space, traits, pinned, lambda name, index, parameter: parameter.default)


def configs(space: SearchSpace, traits: Traits, pinned: Config) -> Iterator[Config]:
    """Every config of the space, in the order of its files' values."""
    names = [name for name in order(space) if name not in pinned]

    def extend(config: dict[str, KnobValue], rest: list[str]) -> Iterator[Config]:
        if not rest:
            yield config
            return
        found = block_for(space, rest[0], {**traits, **config})
        for value in found[1].values() if found else (config[rest[0]],):
            yield from extend({**config, rest[0]: value}, rest[1:])

    yield from extend({**defaults(), **pinned}, names)


def space_folder() -> Path:
    """Where the shipped search spaces lie: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent
    inside = package / "search_spaces"
    return inside if inside.is_dir() else package.parent / "search_spaces"


def load_space(name_or_file: str) -> SearchSpace:
    """A shipped space by name, or a YAML file by path. Raises UserError with file:line for anything wrong."""
    shipped = {path.stem: path for path in sorted(space_folder().glob("*.yaml"))}
    if name_or_file in shipped:
        path = shipped[name_or_file]
    elif Path(name_or_file).is_file():
        path = Path(name_or_file)
    else:
        raise UserError(f"search space: expected a file or one of {', '.join(shipped)}, found {name_or_file!r}")
    return parse_space(path.read_text(), source=path.name if name_or_file in shipped else name_or_file)


def parse_space(text: str, *, source: str) -> SearchSpace:
    """A search space from YAML text; every complaint is a UserError that begins ``source:line:``."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}:{line}: not YAML: {error.problem}") from error
    try:
        complaint = _names_and_values(data)
        space = None if complaint else SearchSpace.model_validate(_coerced(data))
    except ValidationError as error:
        first = error.errors()[0]
        complaint = (_data_path(first["loc"]), first["msg"].removeprefix("Value error, "))
    if complaint:
        path, message = complaint
        where = ".".join(str(part) for part in path)
        raise UserError(f"{source}:{_line(node, path)}: {where + ': ' if where else ''}{message}")
    assert space is not None
    return space


def nearest(name: str, known: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    """The end of a complaint about an unknown name: the nearest known names, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


def _blocks(data: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
    """Each parameter block with its path in the file and its knob's name."""
    for name, blocks in data["parameters"].items():
        if isinstance(blocks, list):
            yield from ((("parameters", name, index), name, block) for index, block in enumerate(blocks))
        else:
            yield ("parameters", name), name, blocks


def _names_and_values(data: Any) -> tuple[tuple[str | int, ...], str] | None:
    """The first complaint that pydantic would word badly: unknown names with the nearest ones, illegal knob values."""
    if not isinstance(data, dict) or not isinstance(data.get("parameters"), dict):
        return (), "expected a mapping with format and parameters"
    for key in data:
        if key not in SearchSpace.model_fields:
            return (key,), f'unknown key "{key}"; {nearest(str(key), list(SearchSpace.model_fields))}'
    for path, name, block in _blocks(data):
        if name not in KNOBS:
            return ("parameters", name), f'unknown knob "{name}"; {nearest(str(name), list(KNOBS))}'
        if complaint := _block_complaint(path, name, block):
            return complaint
    return None


def _block_complaint(path: tuple[str | int, ...], name: str, block: Any) -> tuple[tuple[str | int, ...], str] | None:
    if not isinstance(block, dict):
        return path, "expected a mapping with choices, or low and high, and default and why"
    return _key_complaint(path, block) or _value_complaint(path, name, block)


def _key_complaint(path: tuple[str | int, ...], block: dict[str, Any]) -> tuple[tuple[str | int, ...], str] | None:
    fields = {**Choices.model_fields, **Range.model_fields}
    for key in block:
        if key not in fields:
            return (*path, key), f'unknown key "{key}"; {nearest(str(key), list(fields))}'
    for other in block.get("when") or {}:
        if other not in KNOBS and other not in FACTS:
            return (*path, "when", other), f'unknown condition "{other}"; {nearest(str(other), [*KNOBS, *FACTS])}'
    return None


def _value_complaint(
    path: tuple[str | int, ...], name: str, block: dict[str, Any]
) -> tuple[tuple[str | int, ...], str] | None:
    for key in ("low", "high"):
        if key in block and (not isinstance(block[key], int) or isinstance(block[key], bool)):
            return (*path, key), f'expected a whole number, found "{block[key]}"'
    listed = list(enumerate(block["choices"])) if isinstance(block.get("choices"), list) else []
    for index, value in listed:
        if wrong := problem(name, coerce(name, value)):
            return (*path, "choices", index), wrong
    if "default" in block and (wrong := problem(name, coerce(name, block["default"]))):
        return (*path, "default"), wrong
    return None


def _coerced(data: dict[str, Any]) -> dict[str, Any]:
    def block(name: str, raw: dict[str, Any]) -> dict[str, Any]:
        when = {other: [coerce(other, v) for v in values] for other, values in (raw.get("when") or {}).items()}
        choices = {"choices": [coerce(name, value) for value in raw["choices"]]} if "choices" in raw else {}
        default = {"default": coerce(name, raw["default"])} if "default" in raw else {}
        return {**raw, **choices, **default, "when": when}

    parameters = {
        name: [block(name, raw) for raw in (blocks if isinstance(blocks, list) else [blocks])]
        for name, blocks in data["parameters"].items()
    }
    return {**data, "parameters": parameters}


def _data_path(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """pydantic's location without the names of union members it puts in between."""
    return tuple(part for part in location if part not in ("Choices", "Range"))


def _line(node: yaml.Node | None, path: tuple[str | int, ...]) -> int:
    """The line of the deepest node on this path that the file holds."""
    line = 1
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                if part == 0 or part == "":
                    continue
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line
