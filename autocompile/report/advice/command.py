"""The command that measures one more config of a study's workload."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping

import yaml

from autocompile.knob_table import KNOBS, KnobValue
from autocompile.report.words import word
from autocompile.space import Config
from autocompile.spec import LoraSpec, StudySpec, WorkloadSpec

_FLAGS = {
    "model": "--model",
    "script": "--workload",
    "method": "--method",
    "precision": "--precision",
    "trainer": "--trainer",
    "task": "--task",
    "sequence_length": "--seq-len",
    "lengths": "--lengths",
    "tokenizer": "--tokenizer",
    "image_size": "--image-size",
    "global_batch": "--global-batch",
    "eval_every": "--eval-every",
    "parallel": "--parallel",
    "gpus_per_trial": "--gpus-per-trial",
    "device": "--device",
    "weights": "--weights",
    "trust_remote_code": "--trust-remote-code",
}
_N_TRIALS = 2  # the config and eager beside it


def tune_command(spec: StudySpec, config: Config, changes: Mapping[str, KnobValue]) -> str:
    """`autocompile tune` with this study's workload and pins, this config's departures from defaults, and changes."""
    pins = {
        name: changes.get(name, value)
        for name, value in config.items()
        if name in (*changes, *spec.pinned, "micro_batch") or name not in KNOBS or value != KNOBS[name].default
    }
    pins.pop("parallel", None)  # has a flag
    words = [
        "autocompile",
        "tune",
        *_workload_flags(spec.workload.of_config(config)),
        *_settings({**_fields(spec.workload), **pins}),
    ]
    return shlex.join([*words, "--trials", str(_N_TRIALS)])


def _workload_flags(workload: WorkloadSpec) -> Iterator[str]:
    for field, flag in _FLAGS.items():
        value = getattr(workload, field)
        if value == WorkloadSpec.model_fields[field].default:
            continue
        yield from [flag] if value is True else [flag, str(value)]
    if workload.deepspeed_config:
        yield from ("--deepspeed-config", "FILE")  # a study keeps what it said, and not its name


def _fields(workload: WorkloadSpec) -> dict[str, KnobValue]:
    """What `--set` gives: fields of the workload without a flag of their own, and a script's options."""
    plain: dict[str, KnobValue] = {
        name: getattr(workload, name)
        for name in ("mask",)
        if getattr(workload, name) != WorkloadSpec.model_fields[name].default
    }
    lora = {
        f"lora.{name}": getattr(workload.lora, name)
        for name, field in LoraSpec.model_fields.items()
        if getattr(workload.lora, name) != field.default
    }
    return {**plain, **lora, **{f"workload.{name}": value for name, value in workload.options.items()}}


def _settings(values: Mapping[str, KnobValue]) -> Iterator[str]:
    for name, value in values.items():
        yield from ("--set", f"{name}={word(value) if name in KNOBS else _as_yaml(value)}")


def _as_yaml(value: KnobValue) -> str:
    """As `--set` reads it back: text that YAML takes for something else is quoted."""
    try:
        same = yaml.safe_load(word(value)) == value
    except yaml.YAMLError:  # which `--set` takes as text
        same = True
    return word(value) if same else json.dumps(value)
