"""Put a study's best config onto a model in the user's own script."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

from autocompile.best_file import BestConfig, load
from autocompile.errors import ConfigMismatch
from autocompile.knob_table import KNOBS
from autocompile.knobs import NotApplicable, Setup, apply_config, default_regions
from autocompile.slice.environment import environment
from autocompile.slice.telemetry import compiled_sdpa_kernels, graphs_of, sdpa_kernels
from autocompile.spec import Method, Task
from autocompile.values import major_minor

log = logging.getLogger("autocompile")


@dataclass(frozen=True, kw_only=True)
class Check:
    """What ran: calls and graphs of each compiled group, attention kernels, and what did not fit."""

    calls: Mapping[str, int]
    graphs: Mapping[str, int]
    sdpa_kernels: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What was done to the model, and what only the script can do; every knob is in one of the two."""

    applied: Mapping[str, str]
    yours: Mapping[str, str]
    setup: Setup
    sequence_length: int | None  # None: a script's own samples, which need not be sequences

    def check(self, step: Callable[[], Any] | None = None) -> Check:
        """After a training step: which regions were called and compiled, and which attention kernel they run.

        The kernel is read from the compiled code. With ``step`` one more is run under the profiler, which also sees
        attention that runs eager, and lengths where nothing is compiled. Warns about regions that were never called
        (``loss`` must call the model it is given) or not compiled, and about a sequence length that is not the study's.
        """
        seen_lengths = {length for group in self.setup.groups for length in group.lengths}
        kernels = self._profiled(step, seen_lengths) if step else compiled_sdpa_kernels()
        calls = {group.name: group.calls for group in self.setup.groups}
        graphs = graphs_of(self.setup)
        found = [f"{name} was never called, so it runs eager" for name, n in calls.items() if n == 0]
        found += [f"{name} was called but not compiled" for name, n in calls.items() if n and not graphs[name]]
        limit = self.setup.recompile_limit
        found += [
            f"{name} has {n} graphs, which is its cache_size_limit: for what comes after it runs eager"
            for name, n in graphs.items()
            if n >= limit > 1
        ]
        if self.sequence_length is not None and seen_lengths - {self.sequence_length}:
            lengths = ", ".join(str(length) for length in sorted(seen_lengths))
            found.append(f"sequence length {lengths}: the study measured {self.sequence_length}")
        for text in found:
            log.warning(text)
        return Check(calls=calls, graphs=graphs, sdpa_kernels=kernels, warnings=tuple(found))

    def _profiled(self, step: Callable[[], Any], seen_lengths: set[int]) -> tuple[str, ...]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            if isinstance(ids, torch.Tensor) and ids.ndim == 2:
                seen_lengths.add(ids.shape[1])

        handle = self.setup.model.register_forward_pre_hook(look, with_kwargs=True)
        try:
            with torch.profiler.profile() as profile:
                step()
        finally:
            handle.remove()
        return sdpa_kernels([event.name for event in profile.events() or []])


def apply(model: nn.Module, path: str | Path, *, strict: bool = True) -> Applied:
    """Configure ``model`` in place as the study measured it; after PEFT and ``.to``, before DDP and the first call.

    Raises ConfigMismatch, naming the field, where GPU, versions, method or model type are not the study's;
    ``strict=False`` warns instead. What the script must do itself is in ``yours`` and is logged once at WARNING.
    """
    best = load(path)
    for message in _mismatches(model, best):
        if strict:
            raise ConfigMismatch(f"{path}: {message} (strict=False applies it all the same)")
        log.warning("%s: %s", path, message)
    _warn_if_used(model)
    regions = best.workload.regions or default_regions(model)
    try:
        setup = Setup(
            model=model,
            regions=regions,
            parallel=best.made_for.parallel,
            deepspeed_config=best.workload.spec.deepspeed_config or {},
        )
        setup = apply_config(setup, best.config)
    except NotApplicable as error:
        raise ConfigMismatch(f"{path}: {error}") from error
    if setup.engine_compiles:
        setup = replace(setup, groups=())  # the engine's, which the script has yet to make
    yours = {**setup.yours, **_script_settings(best)}
    log.warning("autocompile: left to your script: %s", "; ".join(yours.values()))
    asked = best.workload.spec
    one_length = not (asked.script or asked.lengths or asked.task is Task.IMAGE_CLASSIFICATION)
    length = best.made_for.sequence_length if one_length else None
    return Applied(applied=setup.applied, yours=yours, setup=setup, sequence_length=length)


def _script_settings(best: BestConfig) -> dict[str, str]:
    made_for, workload = best.made_for, best.workload
    asked = workload.spec
    shapes = f"sequences of {made_for.sequence_length}, all of one length, mask {asked.mask}"
    if asked.lengths:
        shapes = f"sequences of {asked.lengths}, none above {made_for.sequence_length}"
    if asked.task is Task.IMAGE_CLASSIFICATION:
        shapes = f"images of {asked.image_size or 'the usual'} pixels"
    if workload.spec.script:
        shapes = f"the batches of {workload.spec.script}"
    unchanged = best.config.get("optimizer", KNOBS["optimizer"].default) == KNOBS["optimizer"].default
    script = {}
    if workload.spec.script and unchanged:  # it may have one of its own
        script["optimizer"] = f"use the optimizer of {workload.spec.script}"
    if asked.deepspeed_config:
        script["deepspeed_config"] = "keep to the study's DeepSpeed settings, which are workload.spec.deepspeed_config"
    return {
        "gradient_accumulation": f"accumulate {workload.gradient_accumulation} micro-batches per optimizer step",
        "precision": f"train in {workload.precision}",
        **script,
        "sequence_length": f"the study measured {shapes}",
    }


def _mismatches(model: nn.Module, best: BestConfig) -> list[str]:
    here = environment(next(model.parameters()).device)
    adapters = any("lora_" in name for name, _ in model.named_parameters())
    quantised = any(type(module).__name__ == "Linear4bit" for module in model.modules())
    method = Method.QLORA if adapters and quantised else Method.LORA if adapters else Method.FULL
    config = getattr(model, "config", None)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    found: dict[str, object] = {
        "gpu": here.get("gpu"),
        "torch": major_minor(here.get("torch")),
        "triton": major_minor(here.get("triton")),
        "method": str(method),
        "model_type": getattr(config, "model_type", None),
        "world_size": world,
    }
    wanted = best.made_for.model_dump()
    return [
        f"made_for.{field}: the study ran with {wanted[field]}, this is {value}"
        for field, value in found.items()
        if wanted[field] != value
    ]


def _warn_if_used(model: nn.Module) -> None:
    compiled = [name or "the model" for name, module in model.named_modules() if module._compiled_call_impl is not None]
    if compiled or hasattr(model, "_orig_mod"):
        log.warning("%s is compiled already: apply to a model that is not", compiled[0] if compiled else "the model")
    if any(parameter.grad is not None for parameter in model.parameters()):
        log.warning("this model has run already: apply before the first step")
