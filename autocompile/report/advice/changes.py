"""Which knobs a piece of advice changes in a trial's config; what is equal already or cannot be set is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from autocompile.knob_table import AUTOTUNE_MODES, WHOLE_MODEL_SCOPES, KnobValue
from autocompile.report.advice.seen import Case

Settings: TypeAlias = dict[str, KnobValue]


def nothing(case: Case) -> Settings:
    return {}


def to(**settings: KnobValue) -> Callable[[Case], Settings]:
    return lambda case: dict(settings)


def symbolic_sizes(case: Case) -> Settings:
    """From one graph for each size to symbolic ones, from the second size on or at once."""
    return {"dynamic": "auto" if case.config["dynamic"] == "false" else "true"}


def without_cuda_graphs(case: Case) -> Settings:
    if not case.records_graphs:
        return {}
    return {"mode": "max-autotune-no-cudagraphs" if case.config["mode"] == "max-autotune" else "default"}


def higher_limit(case: Case) -> Settings:
    return {"cache_size_limit": max(64, 4 * int(case.config["cache_size_limit"]))}


def less_memory(case: Case) -> Settings:
    smaller = int(case.config["micro_batch"]) // 2
    whole = case.study.spec.workload.global_batch or smaller
    return {"micro_batch": smaller} if smaller and whole % smaller == 0 else {"gradient_checkpointing": True}


def less_memory_on_a_cpu(case: Case) -> Settings:
    return {} if case.on_gpu else less_memory(case)


def whole_model_to_layers(case: Case) -> Settings:
    return {"scope": "layer"} if case.config["scope"] in WHOLE_MODEL_SCOPES else {}


def less_compile(case: Case) -> Settings:
    """The cheapest step down that is left: scope, mode, symbolic sizes."""
    if smaller := whole_model_to_layers(case):
        return smaller
    if case.config["mode"] in AUTOTUNE_MODES:
        return {"mode": "default"}
    return {"dynamic": "auto"} if case.config["dynamic"] == "true" else {}


def as_eager_does(case: Case) -> Settings:
    """The setting that most often changes results: CUDA graphs, then a forced kernel."""
    return without_cuda_graphs(case) or {"sdpa": "auto"}
