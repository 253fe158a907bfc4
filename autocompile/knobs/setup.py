"""What the knobs work on: a model, its regions, and a record of what each knob did or left to the script."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from autocompile.deepspeed_settings import idle_knobs
from autocompile.knob_table import KNOBS, WHOLE_MODEL_SCOPES, KnobValue, family, is_pattern
from autocompile.space import Config


class NotApplicable(Exception):
    """This model has no part that the knob's value could act on."""


@dataclass(kw_only=True)
class CompiledGroup:
    """Equal modules that share one compiled frame; ``frame`` is the name dynamo reports for its graphs."""

    name: str
    frame: str
    modules: tuple[str, ...]
    calls: int = 0  # counted where a module is called from outside a graph
    lengths: set[int] = field(default_factory=set)  # of the sequences in the first of these calls


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model on its way to a config. ``regions`` maps a scope to an fnmatch pattern on dotted module names, or to
    several with "|" between them.

    ``applied`` says what was done to the model or the process, ``yours`` what only the training script can do;
    after `apply_config` every knob is in one of the two.
    """

    model: nn.Module
    regions: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of torch.compile
    recompile_limit: int = 8
    marks_lengths: bool = False  # the sequence dimension of what a region is called with
    parallel: str = "none"  # how it will be wrapped for several GPUs
    wrapper: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of that, DeepSpeed's by its sections
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)  # the user's own
    engine_compiles: bool = False  # DeepSpeed's, in place of the scope
    groups: tuple[CompiledGroup, ...] = ()
    applied: Mapping[str, str] = field(default_factory=dict)
    yours: Mapping[str, str] = field(default_factory=dict)
    sdpa_applied: Literal["region", "process", "no"] = "no"
    checkpointing: Literal["inside", "outside", "no"] = "no"

    def did(self, knob: str, what: str, **changes: Any) -> Setup:
        return replace(self, applied={**self.applied, knob: what}, **changes)


KnobFunction: TypeAlias = Callable[[Setup, Any], Setup]
REGISTRY: dict[str, KnobFunction] = {}


def knob(name: str) -> Callable[[KnobFunction], KnobFunction]:
    """Register the function that applies this knob. Knobs are applied in the order of registration."""

    def register(function: KnobFunction) -> KnobFunction:
        REGISTRY[name] = function
        return function

    return register


def apply_config(setup: Setup, config: Config) -> Setup:
    """Apply every knob, in the registry's order whatever the config's. Raises NotApplicable with nothing changed."""
    config = {name: config.get(name, knob.default) for name, knob in KNOBS.items()}  # it may be older than a knob
    for reason in _obstacles(setup, config):
        raise NotApplicable(reason)
    setup = _without_cache(setup)
    for name, function in REGISTRY.items():
        setup = function(setup, config[name])
    return setup


def _without_cache(setup: Setup) -> Setup:
    """Training reads no cache of keys and values, and its state would be guarded: a graph for each equal layer."""
    config: Any = getattr(setup.model, "config", None)
    configs: tuple[Any, ...] = (config, getattr(config, "text_config", None))
    found = [one for one in configs if getattr(one, "use_cache", False) is True]
    for one in found:
        one.use_cache = False
    return setup.did("use_cache", "off in the model's config, as in Trainer") if found else setup


def _obstacles(setup: Setup, config: Config) -> Iterator[str]:
    if config["scope"] != "none" and not modules_of(setup, config["scope"]):
        yield f"scope {config['scope']}: no module of this model matches"
    if config["scope"] == "nested" and not modules_of(setup, "layer"):
        yield "scope nested: this model has no repeated layers to compile once"
    if config["gradient_checkpointing"] and not modules_of(setup, "layer"):
        yield "gradient_checkpointing: this model has no repeated layers to checkpoint"
    if config["channels_last"] and not has_convolutions(setup.model):
        yield "channels_last: this model has no two-dimensional convolution"
    yield from _attention_obstacles(setup, config)
    yield from _obstacles_of_ranks(setup, config)
    if config["compiled_loss"] and loss_owner(setup.model) is None:
        yield "compiled_loss: this model has no loss function of its own"
    if config["input_gradients"] and input_embedding(setup.model) is None:
        yield "input_gradients: this model names no input embedding"


def _obstacles_of_ranks(setup: Setup, config: Config) -> Iterator[str]:
    if setup.parallel == "fsdp" and str(config["optimizer"]).endswith("8bit"):
        yield f"optimizer {config['optimizer']}: bitsandbytes cannot step the shards of FSDP2"
    weights = next(setup.model.parameters())
    if setup.parallel == "fsdp" and config["fsdp.param_dtype"] == "bf16" and weights.dtype == torch.bfloat16:
        yield "fsdp.param_dtype bf16: the weights are bf16 as they are"
    if family(setup.parallel) == "deepspeed":
        stage, device = int(setup.parallel[-1]), weights.device.type
        yield from idle_knobs(config, setup.deepspeed_config, stage=stage, device=device)


def _attention_obstacles(setup: Setup, config: Config) -> Iterator[str]:
    implicit, other = config["implicit_causal_mask"], config["sdpa"] in ("eager", "flex")
    if (implicit or other) and not hasattr(setup.model, "set_attn_implementation"):
        yield f"{'implicit_causal_mask' if implicit else 'sdpa'}: only a transformers model can change its attention"
        return
    if implicit and not _is_causal(setup.model):
        yield "implicit_causal_mask: not all attention of this model is causal over the whole sequence"
    if config["sdpa"] == "flex" and next(setup.model.parameters()).device.type == "cpu":
        yield "sdpa flex: flex attention has no backward pass on a CPU"
    if config["sdpa"] == "flex" and (dropout := attention_dropout(setup.model)):
        yield f"sdpa flex: this model drops attention weights ({dropout:g}), which flex attention cannot"
    if other and config["padding"] == "packed":
        yield f"sdpa {config['sdpa']}: cannot be given the mask of padding=packed"
    if implicit and (other or config["padding"] == "packed"):
        yield f"implicit_causal_mask: {'sdpa=' + str(config['sdpa']) if other else 'padding=packed'} needs the mask"


def _is_causal(model: nn.Module) -> bool:
    kinds = {bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")}
    return kinds == {True} and not has_windows(model)


def has_windows(model: nn.Module) -> bool:
    """Whether some layers see only what is near, which transformers' masks say and nothing else does."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return bool(kinds or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)))


def attention_dropout(model: nn.Module) -> float:
    config = getattr(model, "config", None)
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)


def set_attention(model: nn.Module, implementation: str) -> None:
    """By transformers' name of it."""
    model.set_attn_implementation(implementation)  # type: ignore[operator]


def loss_owner(model: nn.Module) -> nn.Module | None:
    """The transformers model that calls the loss function it holds, inside an adapter's wrapper or not."""
    return next((module for module in model.modules() if "loss_function" in _names_in_forward(module)), None)


def _names_in_forward(module: nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code.co_names if code is not None else ()


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def input_embedding(model: nn.Module) -> nn.Module | None:
    """That of a transformers model of text."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        found = find() if find else None
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) else None


def modules_of(setup: Setup, scope: KnobValue) -> dict[str, nn.Module]:
    """Dotted names and modules of a scope or pattern; of nested matches only the outermost. Empty if none matches."""
    if scope in WHOLE_MODEL_SCOPES:
        return {"": setup.model}
    pattern = str(scope) if is_pattern(scope) else setup.regions.get(str(scope))
    if pattern is None:
        return {}
    found: dict[str, nn.Module] = {}
    for name, module in setup.model.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in found)
        if name and not nested and any(fnmatchcase(name, one) for one in pattern.split("|")):
            found[name] = module
    return found


ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
QKV_NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "query_key_value", "c_attn")
MLP_NAMES = ("mlp", "ffn", "feed_forward")


def default_regions(model: nn.Module) -> dict[str, str]:
    """Patterns for layers and their parts, from the model's structure; a scope it has no part for is left out.

    The layers are the children of the ModuleList (or Sequential) of at least two modules of one class that holds
    the most parameters; attention, its projections and mlp are found in a layer by their usual names, adapters by
    their own.
    """
    best: tuple[int, str, nn.Module] | None = None
    for name, module in model.named_modules():
        blocks = list(module.children()) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        if len(blocks) >= 2 and len({type(block) for block in blocks}) == 1:
            size = sum(parameter.numel() for parameter in module.parameters())
            if best is None or size > best[0]:
                best = (size, name, blocks[0])
    if best is None:
        return {}
    _, name, block = best
    layer = f"{name}.*" if name else "*"
    return {"layer": layer, **_parts_of_a_layer(layer, block)}


def _parts_of_a_layer(layer: str, block: nn.Module) -> dict[str, str]:
    parts = {}
    for scope, names in (("attention", ATTENTION_NAMES), ("mlp", MLP_NAMES)):
        child = next((child for child in names if hasattr(block, child)), None)
        if child is not None:
            parts[scope] = f"{layer}.{child}"
    inside = [name for name, _ in block.named_modules()]
    projections = [name for name in inside if name.rpartition(".")[2] in QKV_NAMES]
    adapters = [name for name, module in block.named_modules() if hasattr(module, "lora_A")]
    for scope, found in (("qkv", projections), ("lora", adapters)):
        if found:
            parts[scope] = "|".join(f"{layer}.{name}" for name in found)
    return parts
