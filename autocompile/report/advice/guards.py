"""What a failed guard is about, read from dynamo's text, which is the only place that says it."""

from __future__ import annotations

import re
from enum import StrEnum


class Guard(StrEnum):
    """Kinds of guards that call for different advice."""

    REQUIRES_GRAD = "requires_grad"
    SIZE = "size"
    LAYOUT = "layout"
    TYPE = "type"  # of a tensor: its dtype, device or rank
    MODE = "mode"  # training or evaluation, with or without gradients
    SETTING = "setting"  # another state of the whole process, such as autocast
    INTEGER = "integer"  # an integer that a module keeps
    CONTAINER = "container"  # how much a list or dictionary holds
    OBJECT = "object"  # identity or class of a Python object
    STACK = "stack"  # a value left over by a graph break
    VALUE = "value"  # any other Python value
    OTHER = "other"


_INTEGER = "(HINT: torch.compile considers integer attributes"  # behind the line of code that read it
# torch 2.11 and 2.13 differ in how a source is written (L['self'].index, module.index), not in what follows it.
_TEXTS = (
    (Guard.STACK, r"___stack\d"),
    (Guard.REQUIRES_GRAD, r"requires_grad mismatch"),
    (Guard.SIZE, r" size mismatch at index|\.size\(\)\[|\.shape\["),
    (Guard.LAYOUT, r"stride mismatch|\.stride\(\)\[|Duplicate tensors found"),
    (Guard.TYPE, r"(dtype|rank|device index|dispatch key set) mismatch|expected type of .* to be a tensor type"),
    (Guard.MODE, r"\.training\b|grad_mode|inference_mode|is_grad_enabled"),
    (Guard.SETTING, r"GLOBAL_STATE changed|___check_global_state"),
    (Guard.CONTAINER, r"^(not |len\()|___dict_contains|___tuple_iterator_len"),
    (Guard.OBJECT, r"___check_(type|obj)_id"),
    (Guard.VALUE, r" == | is None| is not None"),
)


def kind_of(guard: str) -> Guard:
    if _INTEGER in guard:
        return Guard.INTEGER
    return next((kind for kind, pattern in _TEXTS if re.search(pattern, _condition(guard))), Guard.OTHER)


def source_of(guard: str) -> str:
    """What was guarded, without the values it had: ``module.index``, ``dimension 1 of args[0]``."""
    condition = _condition(guard)
    for pattern, form in _SOURCES:
        if match := re.search(pattern, condition):
            return form.format(*match.groups())
    return condition


_SOURCES = (
    (r"^tensor '(.+)' (?:size|stride) mismatch at index (\d+)", "dimension {1} of {0}"),
    (r"^tensor '(.+)' .*mismatch", "{0}"),
    (r"^expected type of '(.+)' to be", "{0}"),
    (r"([^\s(]+)\.size\(\)\[(\d+)\]", "dimension {1} of {0}"),
    (r"changed: (.+)$", "{0}"),
    (r"^___check_\w+_id\((.+), \d+\)", "{0}"),
    (r"^(?:not )?___dict_contains\((.+), (.+)\)", "{1}"),
    (r"^len\((.+)\) ", "{0}"),
    (r"^not (.+)$", "{0}"),
    (r"^(.+?) (?:==|!=|is) ", "{0}"),
)


def line_of(guard: str) -> str | None:
    """The line of code that made dynamo guard, as far as its text keeps the path."""
    match = re.search(r"  # (\S+:\d+) in ", guard)
    return match[1] if match else None


def readable(guard: str) -> str:
    """In one line, without dynamo's entry numbers, hint, padding, and numbers that differ in every process."""
    text = " ".join(re.sub(r"^\d+/\d+: ", "", guard).split())
    text = re.sub(r" \((HINT|user code shown is first use).*$", "", text)
    return re.sub(r"(___check_\w+_id\(.+?), \d+\)", r"\1)", text)


def _condition(guard: str) -> str:
    """Without dynamo's entry numbers and the line of code that read what is guarded."""
    return re.sub(r"^\d+/\d+: ", "", guard).split("  # ")[0].strip()
