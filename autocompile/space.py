"""Search spaces: which knobs vary, over which values, under which conditions; read strictly from YAML.

A config is one value per knob. Conditions (``when``) name other parameters or facts about the study; a knob whose
conditions do not hold keeps its default, so every config is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import yaml
from pydantic import Field, ValidationError, model_validator

from autocompile.errors import UserError
from autocompile.knob_table import KNOBS, KnobValue, is_pattern
from autocompile.space_rules import coerced, complaints, in_words, line_of
from autocompile.values import Value, parse_yaml, read_text, shown

Config: TypeAlias = Mapping[str, KnobValue]
Traits: TypeAlias = Mapping[str, KnobValue]


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


Parameter: TypeAlias = Choices | Range


class SearchSpace(Value):
    """Parameters by knob name; of several blocks under one name the first whose ``when`` holds counts."""

    format: Literal[1]
    parameters: dict[str, tuple[Annotated[Parameter, Field(union_mode="left_to_right")], ...]]

    @model_validator(mode="before")
    @classmethod
    def _strict(cls, data: object) -> object:
        if isinstance(data, SearchSpace):
            return data
        for path, message in complaints(data):
            raise ValueError(in_words(path, message))
        assert isinstance(data, dict)
        return coerced(data)

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
        raise UserError(f"search space: expected a file or one of {', '.join(shipped)}, found {shown(name_or_file)}")
    return parse_space(read_text(path), source=path.name if name_or_file in shipped else name_or_file)


def parse_space(text: str, *, source: str) -> SearchSpace:
    """A search space from YAML text; every complaint is a UserError that begins ``source:line:``."""
    data = parse_yaml(text, source=source)
    try:
        complaint = next(complaints(data), None)
        space = None if complaint else SearchSpace.model_validate(data)
    except ValidationError as error:  # conditions in a circle
        complaint = ("parameters",), error.errors()[0]["msg"].removeprefix("Value error, ")
    if complaint:
        path, message = complaint
        line = line_of(yaml.compose(text, Loader=yaml.SafeLoader), path)
        raise UserError(f"{source}:{line}: {in_words(path, message)}")
    assert space is not None
    return space
