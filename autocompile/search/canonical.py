"""Which configs are one and the same, which are in a study's space, and which pairs of settings are known to fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from autocompile.knob_table import (
    KNOBS,
    WHOLE_MODEL_SCOPES,
    KnobValue,
    idle,
    is_pattern,
    materialises_mask,
    records_cuda_graphs,
)
from autocompile.space import Config, configs, default_config
from autocompile.spec import Facts, Parallel, StudySpec, WorkloadSpec, traits
from autocompile.values import remembered

Key: TypeAlias = tuple[KnobValue, ...]

_VALUES = itemgetter(*KNOBS)
_DEFAULTS = {name: knob.default for name, knob in KNOBS.items()}


def canonical(config: Config) -> dict[str, KnobValue]:
    """Every knob in the table's order; those that mean nothing beside the others are at their defaults."""
    return {**_DEFAULTS, **config, **{name: _DEFAULTS[name] for name in idle(config)}}


def key(config: Config) -> Key:
    """Equal for two configs exactly if they train the same way."""
    return tuple(_VALUES(canonical(config)))


def is_eager(config: Config) -> bool:
    return config.get("scope", KNOBS["scope"].default) == "none"


def without_compile(config: Config) -> dict[str, KnobValue]:
    """The same training, eager."""
    return canonical({**config, "scope": "none"})


def micro_batch(config: Config) -> int:
    return int(config["micro_batch"])


def known_to_fail(config: Config) -> str | None:
    """The pair of settings in this config that is known to fail, in words; None if there is none."""
    if records_cuda_graphs(config) and config["gradient_checkpointing"]:
        return "CUDA graphs with gradient checkpointing"  # pytorch#154306: replay finds freed inputs
    if config["sdpa"] == "flash" and materialises_mask(config):
        return "forced flash attention in a whole-model trace"  # it materialises the causal mask, flash takes none
    return None


def candidates(spec: StudySpec, facts: Facts) -> tuple[Config, ...]:
    """Every distinct config the study may choose, those with a pair known to fail last."""
    return _domain(spec, facts).configs


def by_key(spec: StudySpec, facts: Facts) -> Mapping[Key, Config]:
    """The candidates in their order."""
    return _domain(spec, facts).by_key


def in_space(spec: StudySpec, facts: Facts, config: Config) -> bool:
    """Whether the study may choose this config; eager ones count also where the space does not list scope none."""
    domain = _domain(spec, facts)
    return key(config) in (domain.eager_keys if is_eager(config) else domain.by_key)


def compiled_scopes(spec: StudySpec, facts: Facts) -> tuple[str, ...]:
    """The scopes of the space at which something is compiled."""
    return _domain(spec, facts).scopes


def paddings(spec: StudySpec, facts: Facts) -> tuple[str, ...]:
    """The ways of the space to pad sequences of different lengths."""
    return _domain(spec, facts).paddings


def ways_to_train(spec: StudySpec, facts: Facts) -> tuple[str, ...]:
    """The space's values of ``parallel``."""
    return _domain(spec, facts).ways


def starting_point(spec: StudySpec, facts: Facts) -> dict[str, KnobValue]:
    """The space's defaults under what is pinned, with the nearest micro-batch that divides the global batch."""
    config = dict(default_config(spec.space, traits(spec, facts), settings(spec, facts)))
    sizes = _domain(spec, facts).micro_batches
    fitting = [size for size in sizes if _divides(spec.workload, {**config, "micro_batch": size})]
    if fitting and config["micro_batch"] not in fitting:
        smaller = [size for size in fitting if size <= micro_batch(config)]
        config["micro_batch"] = smaller[-1] if smaller else fitting[0]
    return canonical(config)


def ladder(spec: StudySpec, facts: Facts, config: Config) -> list[int]:
    """The micro-batches, ascending, at which this config is in the space; its own is always one of them."""
    sizes = _domain(spec, facts).micro_batches
    legal = {size for size in sizes if in_space(spec, facts, {**config, "micro_batch": size})}
    return sorted(legal | {micro_batch(config)})


def settings(spec: StudySpec, facts: Facts) -> dict[str, KnobValue]:
    """The knobs that do not vary: what the user asked for, and the defaults of what the workload freezes."""
    way = spec.workload.parallel
    asked = spec.pinned if way is Parallel.AUTO else {"parallel": str(way), **spec.pinned}
    default = default_config(spec.space, traits(spec, facts), asked)
    return {**{name: default[name] for name in facts.frozen_knobs if name in KNOBS}, **asked}


@dataclass(frozen=True)
class _Domain:
    configs: tuple[Config, ...]
    by_key: Mapping[Key, Config]
    eager_keys: frozenset[Key]  # all of them without compile, which is what they are compared with
    micro_batches: tuple[int, ...]
    scopes: tuple[str, ...]  # without none
    paddings: tuple[str, ...]
    ways: tuple[str, ...]


@remembered(8)
def _domain(spec: StudySpec, facts: Facts) -> _Domain:
    """Once for a study, since a space may hold ten thousand configs."""
    distinct: dict[Key, Config] = {}
    for config in configs(spec.space, traits(spec, facts), settings(spec, facts)):
        if _divides(spec.workload, config) and _has_regions(facts, config):
            distinct.setdefault(key(config), canonical(config))
    found = sorted(distinct.values(), key=lambda config: known_to_fail(config) is not None)
    return _Domain(
        configs=tuple(found),
        by_key={key(config): config for config in found},
        eager_keys=frozenset(key(without_compile(config)) for config in found),
        micro_batches=tuple(sorted({micro_batch(config) for config in found})),
        scopes=tuple(dict.fromkeys(str(config["scope"]) for config in found if not is_eager(config))),
        paddings=tuple(dict.fromkeys(str(config["padding"]) for config in found)),
        ways=tuple(dict.fromkeys(str(config["parallel"]) for config in found)),
    )


def _has_regions(facts: Facts, config: Config) -> bool:
    """A model without such a part cannot be compiled at this scope, one without layers cannot checkpoint them."""
    if facts.regions is None:
        return True
    of_layers = config["gradient_checkpointing"] or config["scope"] == "nested"
    needed = {config["scope"]} - {"none", *WHOLE_MODEL_SCOPES} | ({"layer"} if of_layers else set())
    return all(is_pattern(scope) or scope in facts.regions for scope in needed)


def _divides(workload: WorkloadSpec, config: Config) -> bool:
    if workload.global_batch is None:
        return True
    if config["padding"] == "packed":
        return False  # its rows hold several sequences, so that a batch of as many rows is a larger one
    return workload.global_batch % (micro_batch(config) * workload.n_ranks(config)) == 0
