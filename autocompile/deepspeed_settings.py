"""DeepSpeed's own settings in a study: the user's JSON, what the study decides in it, and which knobs do something."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from autocompile.errors import UserError
from autocompile.knob_table import KNOBS, KnobValue, problem
from autocompile.values import read_text, shown

DeepSpeedConfig: TypeAlias = Mapping[str, Any]

# Where a knob stands in DeepSpeed's JSON.
PLACES = {
    "deepspeed.overlap_comm": ("zero_optimization", "overlap_comm"),
    "deepspeed.reduce_bucket_size": ("zero_optimization", "reduce_bucket_size"),
    "deepspeed.allgather_bucket_size": ("zero_optimization", "allgather_bucket_size"),
    "deepspeed.deepcompile": ("compile", "deepcompile"),
}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_REPLACED = (*_BATCH, "optimizer", "scheduler", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
_SECTIONS = ("zero_optimization", "fp16", "bf16", "torch_autocast", "compile", "optimizer", "scheduler")
_ADAMW = ("adam", "adamw")  # DeepSpeed's Adam is AdamW unless its adam_w_mode says otherwise
_OTHER_WAYS = ("autotuning", "elasticity", "tensor_parallel", "sequence_parallel_size", "expert_parallel", "pipeline")
_OFFLOADS = {"offload_optimizer": (1, 2, 3), "offload_param": (3,)}  # by the stages that look at them
_AUTO = "auto"  # as Trainer's templates have it: whoever starts the training fills it in


def read_deepspeed_file(path: Path) -> dict[str, Any]:
    """The user's JSON as it is; raises UserError where it is none."""
    try:
        found = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: expected DeepSpeed's JSON: {error.msg}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object, found {shown(found)}")
    return found


def engine_config(
    user: DeepSpeedConfig,
    knobs: DeepSpeedConfig,
    *,
    stage: int,
    precision: str,
    n_micro_batches: int,
) -> DeepSpeedConfig:
    """What deepspeed.initialize is given: the user's fixed part, the knobs in their sections, and what the study
    decides. With bf16 weights DeepSpeed keeps fp32 ones for the optimizer, as under Trainer."""
    ours = {
        "train_micro_batch_size_per_gpu": 1,  # only its product with the others is used, for its log
        "gradient_accumulation_steps": n_micro_batches,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
        # else its engine switches off the autocast around it
        "torch_autocast": {"enabled": precision == "bf16-mixed", "dtype": "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return _merged(_merged(fixed_part(user), knobs), ours)


def in_sections(knobs: Mapping[str, KnobValue]) -> dict[str, Any]:
    """The knobs that depart from DeepSpeed's own values, where they stand in its JSON."""
    found: dict[str, Any] = {}
    for name, value in knobs.items():
        if value != KNOBS[name].default:
            section, key = PLACES[name]
            found[section] = {**found.get(section, {}), key: value}
    return found


def _merged(settings: DeepSpeedConfig, others: DeepSpeedConfig) -> dict[str, Any]:
    """Both, section by section; where they differ ``others`` count."""
    both = {
        name: _merged(settings[name], value) if isinstance(value, Mapping) else value
        for name, value in others.items()
        if name in settings
    }
    return {**settings, **others, **both}


def fixed_part(config: DeepSpeedConfig) -> dict[str, Any]:
    """What DeepSpeed gets of the user's settings: without "auto" and what the study decides."""
    kept = _without_auto(config)
    return {name: value for name, value in kept.items() if name not in _REPLACED}


def replaced(config: DeepSpeedConfig) -> list[str]:
    """Settings of the user's that the study's own take the place of."""
    return [name for name in _without_auto(config) if name in _REPLACED]


def knobs_of(config: DeepSpeedConfig) -> dict[str, KnobValue]:
    """The knobs that these settings fix."""
    kept = _without_auto(config)
    found = {name: kept[section][key] for name, (section, key) in PLACES.items() if key in kept.get(section, {})}
    return {name: _whole(value) for name, value in found.items()}


def precision_of(config: DeepSpeedConfig) -> str | None:
    """What these settings train in, where they leave no choice."""
    allowed = _precisions(_without_auto(config))
    if allowed == ["bf16-mixed", "fp32"]:
        return "fp32"  # which is DeepSpeed's where no section asks for another one
    return allowed[0] if len(allowed) == 1 else None


def misfits(config: DeepSpeedConfig, *, stage: int | None, precision: str | None) -> Iterator[str]:
    """What of the user's settings this study cannot take, each with its place and what was expected."""
    if stage is None:
        yield "these are DeepSpeed's settings: give --parallel zero0, zero1, zero2 or zero3"
        return
    kept = _without_auto(config)
    for name in _SECTIONS:
        if not isinstance(kept.get(name, {}), dict):
            yield f"{name}: expected an object, found {shown(kept[name])}"
            return
    yield from _strangers(kept)
    yield from _zero_misfits(kept.get("zero_optimization", {}), stage)
    yield from _precision_misfits(kept, precision)
    yield from _optimizer_misfits(kept.get("optimizer", {}))
    for name, value in knobs_of(kept).items():
        if wrong := problem(name, value):
            yield f"{'.'.join(PLACES[name])}: {wrong}"


def _strangers(kept: DeepSpeedConfig) -> Iterator[str]:
    """DeepSpeed itself ignores a section that it does not know."""
    for name in kept:
        if name not in _SECTIONS and (meant := get_close_matches(name, _SECTIONS, n=1, cutoff=0.85)):
            yield f"{name}: DeepSpeed has no such section; did you mean {meant[0]}?"
    for name in _OTHER_WAYS:
        if kept.get(name):
            yield f"{name}: not covered; a trial is data parallel on one host, with the settings it is given"


def idle_knobs(
    config: Mapping[str, KnobValue], user: DeepSpeedConfig, *, stage: int, device: str | None
) -> Iterator[str]:
    """Knobs of DeepSpeed that this config has at another value than the default, and that would change nothing.

    As DeepSpeed 0.19 reads them. What the user's own file says about ZeRO goes on to DeepSpeed whether it looks at it
    or not. ``device`` is None where nobody knows it yet.
    """
    users = knobs_of({"zero_optimization": _without_auto(user).get("zero_optimization", {})})
    departs = {
        name
        for name, value in config.items()
        if name.startswith("deepspeed.") and value not in (KNOBS[name].default, users.get(name))
    }
    for name in sorted(departs & {"deepspeed.overlap_comm", "deepspeed.reduce_bucket_size"}):
        if stage == 0:
            yield f"{name}: ZeRO stage 0 reduces all gradients at the end, in buckets of a fixed size"
    if "deepspeed.overlap_comm" in departs and stage == 3 and device == "cpu":
        yield "deepspeed.overlap_comm: ZeRO stage 3 overlaps by streams, which a CPU does not have"
    if "deepspeed.allgather_bucket_size" in departs:
        yield (
            "deepspeed.allgather_bucket_size: DeepSpeed gathers weights in one message with this torch, "
            "and reads the size with older ones alone"
        )
    if "deepspeed.compile" in departs and config.get("scope", "model") != "model":
        yield "deepspeed.compile: DeepSpeed's engine compiles the whole model: it means nothing without scope=model"
    if "deepspeed.deepcompile" in departs and config.get("deepspeed.compile", True):
        yield from _deepcompile_obstacles(config, stage, device)


def _deepcompile_obstacles(config: Mapping[str, KnobValue], stage: int, device: str | None) -> Iterator[str]:
    if device == "cpu":
        yield "deepspeed.deepcompile: DeepSpeed's DeepCompile needs CUDA"
    if stage == 0:
        yield "deepspeed.deepcompile: DeepCompile is for ZeRO stages 1 to 3"
    if config.get("backend", "inductor") != "inductor" or config.get("mode", "default") != "default":
        yield "deepspeed.deepcompile: DeepCompile is a backend of its own, over inductor in its default mode"


def _zero_misfits(zero: Mapping[str, Any], stage: int) -> Iterator[str]:
    if zero.get("stage", stage) != stage:
        yield f"zero_optimization.stage: expected {stage} as in --parallel zero{stage}, found {shown(zero['stage'])}"
    for name, stages in _OFFLOADS.items():
        section = zero.get(name) or {}
        if not isinstance(section, dict):
            yield f"zero_optimization.{name}: expected an object, found {shown(section)}"
            continue
        device = section.get("device", "none")
        if device not in ("none", "cpu"):
            yield f"zero_optimization.{name}.device: expected none or cpu, found {shown(device)}"
        elif device == "cpu" and stage not in stages:
            yield f"zero_optimization.{name}: ZeRO stage {stage} has nothing to offload this way"


def _precision_misfits(config: DeepSpeedConfig, precision: str | None) -> Iterator[str]:
    """`bf16` is DeepSpeed's of this name, with fp32 weights for the optimizer; `bf16-mixed` is its torch_autocast."""
    if config.get("fp16", {}).get("enabled"):
        yield "fp16.enabled: DeepSpeed's scaled fp16 is not measured; --precision bf16 needs no scaler"
        return
    if config.get("torch_autocast", {}).get("enabled") and config["torch_autocast"].get("dtype") == "float16":
        yield "torch_autocast.dtype: expected bfloat16 as in --precision bf16-mixed, found float16"
        return
    allowed = _precisions(config)
    if not allowed:
        yield "bf16 and torch_autocast: expected at most one of them enabled"
    elif precision is not None and precision not in allowed:
        sections = " and ".join(name for name in ("bf16", "torch_autocast") if "enabled" in config.get(name, {}))
        yield f"{sections}: expected what --precision {precision} asks for, found settings for {' or '.join(allowed)}"


def _precisions(config: DeepSpeedConfig) -> list[str]:
    """Those that the sections allow: all where they say nothing."""
    bf16, autocast = (config.get(name, {}).get("enabled") for name in ("bf16", "torch_autocast"))
    ways = {"bf16": (True, False), "bf16-mixed": (False, True), "fp32": (False, False)}
    return [way for way, (one, other) in ways.items() if bf16 in (None, one) and autocast in (None, other)]


def _optimizer_misfits(section: Mapping[str, Any]) -> Iterator[str]:
    """A section for AdamW asks for what the knob `optimizer` trains with; rates and decay change no speed."""
    name = section.get("type", _ADAMW[0])
    if str(name).lower() not in _ADAMW:
        yield f"optimizer.type: expected AdamW, which the knob optimizer has several of, found {shown(name)}"


def _without_auto(config: DeepSpeedConfig) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if value != _AUTO
    }


def _whole(value: Any) -> Any:
    """JSON's 5e8 is no whole number to Python, but one to DeepSpeed."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
