"""What is compiled: the scope, applied last, compiles modules in place.

Dynamo is imported where it is used: its import fails in obscure ways where inductor's cache folder is broken, which
the preflight is there to name.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autocompile.knob_table import WHOLE_MODEL_SCOPES
from autocompile.knobs.setup import CompiledGroup, Setup, knob, loss_owner, modules_of


@knob("compiled_loss")
def compiled_loss(setup: Setup, on: bool) -> Setup:
    """Fuse the loss, whose logits are the largest activations of a language model; a compiled model holds it anyway."""
    if not on:
        return setup.did("compiled_loss", "off")
    owner = loss_owner(setup.model)
    assert owner is not None  # or the config was refused
    inner: Callable[..., Any] = owner.loss_function  # type: ignore[assignment]
    owner.loss_function = torch.compile(inner, **setup.options)  # type: ignore[assignment]
    return setup.did("compiled_loss", "of the model's head")


@knob("scope")
def scope(setup: Setup, name: str) -> Setup:
    """Compile the modules of this scope in place: keys, class and identity of every module stay."""
    if name == "none":
        return setup.did("scope", "nothing is compiled")
    modules = modules_of(setup, name)
    _set_recompile_limit(setup.recompile_limit)
    if setup.engine_compiles:
        frame = f"autocompile_region_{next(_NUMBERS)}"
        group = CompiledGroup(name=f"{name}:{type(setup.model).__name__}", frame=frame, modules=("",))
        return setup.did("scope", "left to DeepSpeed's engine.compile", groups=(group,))
    if name == "nested":
        _share_one_graph(modules_of(setup, "layer"))
    groups = _compile_in_place(modules, name, setup)
    around = setup.checkpointing == "inside" and not _holds_layers(name)
    return setup.did(
        "scope",
        f"{len(modules)} modules in {len(groups)} groups",
        groups=groups,
        checkpointing="outside" if around else setup.checkpointing,
    )


def _set_recompile_limit(limit: int) -> None:
    from torch._dynamo import config

    config.recompile_limit = limit
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)


def _holds_layers(name: str) -> bool:
    return name in (*WHOLE_MODEL_SCOPES, "layer")


def _share_one_graph(layers: Mapping[str, nn.Module]) -> None:
    """Within the trace of the whole model, equal layers become calls of one graph that is compiled once.

    nested_compile_region wants a function of the module, not a method bound to it.
    """
    for members in _by_kind(layers).values():
        region = torch.compiler.nested_compile_region(types.FunctionType(_layer.__code__, globals()))
        for layer in members.values():
            inner: Callable[..., Any] = layer.forward
            layer.forward_in_region = inner  # type: ignore[assignment]
            layer.forward = functools.partial(region, layer)


def _layer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward_in_region(*args, **kwargs)  # type: ignore[operator]


_CALLS_LOOKED_AT = 256


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Of at least two dimensions, also those in pairs such as rotary embeddings."""
    for value in (*args, *kwargs.values()):
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, torch.Tensor) and one.dim() >= 2:
                yield one


def _sequence_lengths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The second dimension of a call's first tensor that has one."""
    return {tensor.shape[1] for tensor in itertools.islice(_tensors(args, kwargs), 1)}


def _length_at(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of (batch, sequence, width), of whole numbers (batch, sequence), and of masks (batch, 1, sequence, sequence)."""
    if tensor.dim() == 3 or (tensor.dim() == 2 and not tensor.is_floating_point()):  # else rows of features
        return (1,)
    is_mask = tensor.dim() == 4 and tensor.shape[1] == 1 and tensor.shape[2] == tensor.shape[3]
    return (2, 3) if is_mask else ()


def _mark_lengths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wherever the first tensor's sequence length is found again."""
    from torch._dynamo import mark_dynamic

    lengths = _sequence_lengths(args, kwargs)
    for tensor in _tensors(args, kwargs):
        for dimension in _length_at(tensor):
            if tensor.shape[dimension] in lengths:
                mark_dynamic(tensor, dimension)


@dataclass
class _CompiledCall:
    """Stands in for the module's ``_call_impl`` or ``forward``; counts the calls that come from outside a graph."""

    module: nn.Module
    compiled: Callable[..., Any]
    group: CompiledGroup
    marks_lengths: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.group.calls += 1
        if self.marks_lengths:
            _mark_lengths(args, kwargs)
        if self.group.calls <= _CALLS_LOOKED_AT:
            self.group.lengths |= _sequence_lengths(args, kwargs)
        return self.compiled(self.module, *args, **kwargs)


# Never the same name twice in a process: dynamo remembers by file, line and name which sizes turned out to vary.
_NUMBERS = itertools.count()


def _region(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _region_inside_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward_inside_hooks(*args, **kwargs)  # type: ignore[operator]


def _compile_in_place(modules: dict[str, nn.Module], scope: str, setup: Setup) -> tuple[CompiledGroup, ...]:
    """One compiled frame per group of equal modules.

    ``module.compile()`` does nothing for torch.nn's own classes, whose frames dynamo skips; a frame of ours around
    ``_call_impl`` is traced. Dynamo keeps graphs and the recompile limit per code object, so each group gets a copy:
    modules of different width must not use up one limit.
    """
    groups: list[CompiledGroup] = []
    inside_hooks = setup.parallel == "fsdp"  # FSDP2's, which a module gets later, would break the graph
    region = _region_inside_hooks if inside_hooks else _region
    for members in _by_kind(modules).values():
        frame = f"autocompile_region_{next(_NUMBERS)}"
        code = region.__code__.replace(co_name=frame, co_qualname=frame)
        compiled = torch.compile(types.FunctionType(code, globals(), frame), **setup.options)
        kind = type(next(iter(members.values()))).__name__
        alike = sum(group.name.split("#")[0] == f"{scope}:{kind}" for group in groups)
        name = f"{scope}:{kind}#{alike + 1}" if alike else f"{scope}:{kind}"
        group = CompiledGroup(name=name, frame=frame, modules=tuple(members))
        for module in members.values():
            call = _CompiledCall(module, compiled, group, setup.marks_lengths)
            if inside_hooks:
                module.forward_inside_hooks = module.forward  # type: ignore[assignment]
                module.forward = call
            else:
                module._compiled_call_impl = call
        groups.append(group)
    return tuple(groups)


def count_and_name(module: nn.Module, compile_in_place: Callable[[], None], setup: Setup) -> None:
    """Let something else compile this module in place, as the one group of ``setup``.

    The frame around ``forward`` has a name of its own for dynamo to report, and is traced also where the module is one
    of torch.nn's; hooks of the module stay outside of it, as they are for whoever compiles.
    """
    (group,) = setup.groups
    code = _region_inside_hooks.__code__.replace(co_name=group.frame, co_qualname=group.frame)
    module.forward_inside_hooks = module.forward  # type: ignore[assignment]
    module.forward = functools.partial(types.FunctionType(code, globals(), group.frame), module)
    compile_in_place()
    compiled: Any = module._compiled_call_impl
    call = _CompiledCall(module, lambda _, *args, **kwargs: compiled(*args, **kwargs), group, setup.marks_lengths)
    module._compiled_call_impl = call


def _by_kind(modules: Mapping[str, nn.Module]) -> dict[Hashable, dict[str, nn.Module]]:
    found: dict[Hashable, dict[str, nn.Module]] = {}
    for name, module in modules.items():
        found.setdefault(_kind(module), {})[name] = module
    return found


def _kind(module: nn.Module) -> Hashable:
    """Equal for modules that one graph can serve: same classes and same parameters all the way down."""
    classes = tuple((name, type(child)) for name, child in module.named_modules())
    parameters = tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    )
    return classes, parameters
