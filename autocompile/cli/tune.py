"""`autocompile tune`: search, confirm, and say whether compile pays."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autocompile.cli.flags import JsonFlag, StorageFlag
from autocompile.cli.output import console
from autocompile.errors import NothingMeasured, UserError
from autocompile.place import STORAGE, Place

if TYPE_CHECKING:
    from rich.console import Console

    from autocompile.api import Opened
    from autocompile.settings import Settings
    from autocompile.tuner import StudyResult


def _flag(name: str, metavar: str | None, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text)


def _require_local(executor: str) -> str:
    if executor != "local":
        raise UserError(f'--executor: expected local, found "{executor}"')
    return executor


Model = Annotated[str | None, _flag("--model", "NAME|HUB_ID|DIR", "What to train; see `autocompile models`.")]
Workload = Annotated[str | None, _flag("--workload", "FILE.py:FUNCTION", "Your own training instead of a model.")]
Spec = Annotated[str | None, _flag("--spec", "FILE", "A study's spec.yaml instead of a model and flags.")]
Budget = Annotated[str | None, _flag("--budget", "TIME", "Wall-clock time, such as 90s, 30m, 2h. [default: 30m]")]
Trials = Annotated[int | None, _flag("--trials", "N", "Measured baseline and search trials at most.")]
Trainer = Annotated[
    str | None, _flag("--trainer", "hf", "The --workload function returns a Hugging Face Trainer instead of a Job.")
]
Task = Annotated[
    str | None,
    _flag(
        "--task",
        "causal-lm|masked-lm|classification|image-classification",
        "What the model's head is for. [default: as published]",
    ),
]
Method = Annotated[str | None, _flag("--method", "full|lora|qlora", "[default: lora from 1B parameters, else full]")]
Precision = Annotated[
    str | None, _flag("--precision", "bf16|bf16-mixed|fp16-mixed|fp32", "[default: bf16, fp32 on CPUs]")
]
SeqLen = Annotated[int | None, _flag("--seq-len", "N", "Tokens of one sequence. [default: 1024]")]
Lengths = Annotated[
    str | None,
    _flag("--lengths", "uniform:A-B|lognormal:MEDIAN,SIGMA|FILE", "Lengths of sequences. [default: all --seq-len]"),
]
Tokenizer = Annotated[
    str | None, _flag("--tokenizer", "HUB_ID|DIR", "Counts the tokens of a .jsonl of --lengths. [default: the model's]")
]
ImageSize = Annotated[int | None, _flag("--image-size", "N", "Pixels on a side. [default: as the model was made for]")]
GlobalBatch = Annotated[int | None, _flag("--global-batch", "N", "Sequences of an optimizer step, by accumulation.")]
EvalEvery = Annotated[
    int | None, _flag("--eval-every", "N", "An evaluation step after every N optimizer steps. [default: none]")
]
Tokens = Annotated[str | None, _flag("--tokens", "T", "Length of the planned run, such as 50M: compile time counts.")]
Steps = Annotated[int | None, _flag("--steps", "N", "Length of the planned run in global batches.")]
Headroom = Annotated[str | None, _flag("--memory-headroom", "PERCENT", "GPU memory to keep free. [default: 8%]")]
Parallel = Annotated[
    str | None, _flag("--parallel", "none", "ddp, fsdp, zero0 to zero3: how a trial uses several GPUs; auto compares.")
]
GpusPerTrial = Annotated[int | None, _flag("--gpus-per-trial", "1", "GPUs of one trial, or processes on a CPU.")]
DeepSpeedConfig = Annotated[
    str | None, _flag("--deepspeed-config", "FILE", "Your own DeepSpeed JSON; what it sets is not searched.")
]
Against = Annotated[
    str | None,
    _flag("--against", "FILE|KEY=VALUE,...", "What you train with today, to be compared with. [default: none]"),
]
Executor = Annotated[
    str, typer.Option("--executor", metavar="local", help="Where slices run.", callback=_require_local)
]
Set = Annotated[
    list[str] | None, _flag("--set", "KEY=VALUE", "Pin a knob (micro_batch=4) or set a workload's field (lora.r=64).")
]
Space = Annotated[str | None, _flag("--search-space", "FILE|NAME", "[default: default, or qlora for --method qlora]")]
Sampler = Annotated[str | None, _flag("--sampler", "auto|tpe|random|grid", "[default: auto]")]
Device = Annotated[str | None, _flag("--device", "cuda|cpu", "[default: the GPU if there is one]")]
Gpus = Annotated[str | None, _flag("--gpus", "LIST", "Indices such as 0,1; one slice runs on each. [default: all]")]
StudyName = Annotated[str | None, _flag("--study", "NAME", "[default: made of model, method, GPU and spec]")]
Python = Annotated[str | None, _flag("--python", "PATH", "Interpreter that runs the slices. [default: this one]")]
Seed = Annotated[int | None, _flag("--seed", "N", "[default: 0]")]
Weights = Annotated[bool, _flag("--weights", None, "Load real weights instead of random ones.")]
Trust = Annotated[bool, _flag("--trust-remote-code", None, "Let a Hub model run its own code.")]


def tune(
    model: Model = None,
    workload: Workload = None,
    spec: Spec = None,
    budget: Budget = None,
    trials: Trials = None,
    trainer: Trainer = None,
    task: Task = None,
    method: Method = None,
    precision: Precision = None,
    seq_len: SeqLen = None,
    lengths: Lengths = None,
    tokenizer: Tokenizer = None,
    image_size: ImageSize = None,
    global_batch: GlobalBatch = None,
    eval_every: EvalEvery = None,
    tokens: Tokens = None,
    steps: Steps = None,
    memory_headroom: Headroom = None,
    set: Set = None,
    search_space: Space = None,
    sampler: Sampler = None,
    device: Device = None,
    gpus: Gpus = None,
    parallel: Parallel = None,
    gpus_per_trial: GpusPerTrial = None,
    deepspeed_config: DeepSpeedConfig = None,
    executor: Executor = "local",
    study: StudyName = None,
    storage: StorageFlag = STORAGE,
    python: Python = None,
    seed: Seed = None,
    weights: Weights = False,
    trust_remote_code: Trust = False,
    against: Against = None,
    json: JsonFlag = False,
) -> None:
    """Measure training slices of this model on this machine, and end with a verdict on torch.compile."""
    settings = _settings(locals())  # taken before there are other names
    place = Place(study=study, storage=storage, python=python or sys.executable, gpus=parse_gpus(gpus))
    _end(_run(settings, console(stderr=True), place), json=json)


def _end(result: StudyResult, *, json: bool) -> None:
    if json:
        from autocompile.cli.stored import print_document

        print_document(result)
    if result.verdict.config is None:
        raise NothingMeasured(f"{result.name}: nothing was measured; `autocompile explain {result.name}` says why")


def _settings(arguments: Mapping[str, Any]) -> Settings:
    from autocompile.settings import Settings

    given = {field.name: arguments[field.name] for field in fields(Settings)}
    return Settings(**{name: value for name, value in given.items() if value is not None and value is not False})


def _run(settings: Settings, console: Console, place: Place) -> StudyResult:
    from autocompile.settings import study_spec

    spec = study_spec(settings)
    if place.gpus and spec.workload.device == "cpu":
        raise UserError("--gpus: there are none to use with --device cpu")

    console.print("checking the machine and the workload ...")
    from autocompile.api import opened
    from autocompile.cli.live import watching

    with opened(spec, place) as ready:
        for line in introduction(ready):
            console.print(line)
        with watching(console, spec.budget.seconds) as watch:
            result = ready.run(watch)
        _conclude(console, ready, result)
        return result


def parse_gpus(text: str | None) -> tuple[int, ...]:
    """``0,1`` as indices; empty means all."""
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or len({int(part) for part in parts}) != len(parts):
        raise UserError(f'--gpus: expected different indices such as 0 or 0,1, found "{text}"')
    return tuple(int(part) for part in parts)


def introduction(ready: Opened) -> list[str]:
    """What is about to happen, with all that was not asked for but decided."""
    from autocompile.deepspeed_settings import replaced
    from autocompile.report.words import duration, workload

    limit = ready.spec.budget.seconds
    lines = [
        workload(ready.spec, ready.facts),
        f"study {ready.name} in {ready.folder}" + (f", budget {duration(limit)}" if limit is not None else ""),
    ]
    if names := replaced(ready.spec.workload.deepspeed_config or {}):
        lines.append(f"the study's own takes the place of {', '.join(names)} in DeepSpeed's settings")
    frozen = ready.facts.frozen_knobs.items()
    return [*lines, *(f"{knob} stays as it is: {why}" for knob, why in frozen if knob in ready.spec.space.parameters)]


def _conclude(console: Console, ready: Opened, result: StudyResult) -> None:
    """The table, the verdict, where the files are, and the line that puts the best config into training."""
    from autocompile.report.terminal import summary

    console.print(summary(result))
    if result.best is not None:
        best = ready.folder / "best.yaml"
        console.print(f"best config  {best}", soft_wrap=True)
        console.print(f"report       {ready.folder / 'report.md'}", soft_wrap=True)
        console.print(f'in training  autocompile.apply(model, "{best}")', soft_wrap=True)
