"""What a user asks for, from flags and KEY=VALUE words to a study's spec: one place for command line and Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autocompile.assignments import config_of, legal, split_assignments
from autocompile.catalogue import catalogue, source_of, tokenizer_of
from autocompile.deepspeed_settings import idle_knobs, knobs_of, misfits, precision_of, read_deepspeed_file
from autocompile.errors import UserError
from autocompile.knob_table import KNOBS, KnobValue, family, idle
from autocompile.lengths import Texts, parse_lengths
from autocompile.space import Choices, defaults, load_space
from autocompile.spec import Budget, Method, Paired, Parallel, Precision, StudySpec, WorkloadSpec
from autocompile.values import nearest, parse_duration, parse_percent, parse_tokens, parse_yaml, read_text, shown

DEFAULT_BUDGET = "30m"
_FLAGS = {
    "model": "model",
    "script": "workload",
    "trainer": "trainer",
    "task": "task",
    "method": "method",
    "precision": "precision",
    "sequence_length": "seq_len",
    "lengths": "lengths",
    "tokenizer": "tokenizer",
    "image_size": "image_size",
    "global_batch": "global_batch",
    "eval_every": "eval_every",
    "weights": "weights",
    "trust_remote_code": "trust_remote_code",
    "device": "device",
    "parallel": "parallel",
    "gpus_per_trial": "gpus_per_trial",
}
_DECIDING = ("scope", "backend", "mode")  # by which other knobs mean something or not
_WITH_A_SPEC_FILE = ("spec", "budget", "trials", "tokens", "steps")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of `tune` as they were typed; None is a flag that was not given."""

    model: str | None = None
    workload: str | None = None
    spec: str | None = None
    budget: str | None = None
    trials: int | None = None
    trainer: str | None = None
    task: str | None = None
    method: str | None = None
    precision: str | None = None
    seq_len: int | None = None
    lengths: str | None = None
    tokenizer: str | None = None
    image_size: int | None = None
    global_batch: int | None = None
    eval_every: int | None = None
    tokens: str | None = None
    steps: int | None = None
    memory_headroom: str | None = None
    set: Sequence[str] = ()
    search_space: str | None = None
    sampler: str | None = None
    device: str | None = None
    parallel: str | None = None
    gpus_per_trial: int | None = None
    deepspeed_config: str | None = None
    seed: int | None = None
    weights: bool | None = None
    trust_remote_code: bool | None = None
    against: str | None = None


def study_spec(settings: Settings) -> StudySpec:
    """The study that these settings ask for; raises UserError for whatever is wrong with them."""
    if [settings.model, settings.workload, settings.spec].count(None) != 2:
        raise UserError("expected exactly one of --model, --workload and --spec")
    if settings.spec is None:
        spec = _validated(_from_flags(settings), source="", deepspeed_file=settings.deepspeed_config)
    else:
        _refuse_beside_a_spec(settings)
        spec = read_spec(Path(settings.spec))
    return spec.model_copy(update={"budget": _budget(settings, spec.budget), **_planned_run(settings, spec.workload)})


def read_spec(path: Path) -> StudySpec:
    """A study's spec from YAML; ``space`` may be a file, the name of a shipped one, or the whole space."""
    data = parse_yaml(read_text(path), source=str(path))
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping with workload and space, found {shown(data)}")
    if isinstance(data.get("space"), str):
        data = {**data, "space": load_space(data["space"]).model_dump(mode="json")}
    return _validated(data, source=str(path))


def _from_flags(settings: Settings) -> dict[str, Any]:
    pinned, workload = split_assignments(settings.set)
    if settings.workload is None and "options" in workload:
        raise UserError(f"--set workload.{next(iter(workload['options']))}: only a --workload script takes options")
    if settings.trainer and (settings.precision or settings.lengths):
        raise UserError("--trainer hf: precision and lengths are what the Trainer's arguments and data set say")
    flags = {field: getattr(settings, flag) for field, flag in _FLAGS.items()}
    known = catalogue().get(settings.model or "")
    if known and known.sequence_length and settings.seq_len is None:
        flags["sequence_length"] = known.sequence_length
    family = "qlora" if settings.method == Method.QLORA else known.space if known else "default"
    theirs = settings.deepspeed_config
    flags["deepspeed_config"] = read_deepspeed_file(Path(theirs)) if theirs is not None else None
    found: dict[str, Any] = {
        "workload": {**{name: value for name, value in flags.items() if value is not None}, **workload},
        "space": load_space(settings.search_space or family).model_dump(mode="json"),
        "pinned": pinned,
    }
    if settings.sampler is not None:
        found["plan"] = {"type": "search", "sampler": settings.sampler}
    if settings.memory_headroom is not None:
        found["memory_headroom"] = parse_percent(settings.memory_headroom)
    if settings.seed is not None:
        found["seed"] = settings.seed
    return {**found, "against": config_of(settings.against, "--against") if settings.against is not None else None}


def _budget(settings: Settings, in_file: Budget) -> Budget:
    """A flag before the spec file, the file before the default."""
    if settings.trials is not None and settings.trials < 1:
        raise UserError(f"--trials: expected a whole number from 1, found {settings.trials}")
    if settings.budget is not None:
        seconds = parse_duration(settings.budget)
    else:
        seconds = in_file.seconds or parse_duration(DEFAULT_BUDGET)
    return Budget(seconds=seconds, trials=settings.trials or in_file.trials)


def _refuse_beside_a_spec(settings: Settings) -> None:
    given = [
        field.name
        for field in fields(settings)
        if field.name not in _WITH_A_SPEC_FILE and getattr(settings, field.name) not in (None, (), [])
    ]
    if given:
        raise UserError(f"--{given[0].replace('_', '-')}: the spec file says this already; change it there")


def _planned_run(settings: Settings, workload: WorkloadSpec) -> dict[str, int | None]:
    """The fields of the spec that say how long the planned run is; none of them where no flag does."""
    if settings.tokens is not None and settings.steps is not None:
        raise UserError("expected at most one of --tokens and --steps")
    if settings.tokens is not None:
        return {"planned_tokens": parse_tokens(settings.tokens), "planned_steps": None}
    if settings.steps is None:
        return {}
    if settings.steps < 1:
        raise UserError(f"--steps: expected a whole number from 1, found {settings.steps}")
    if workload.global_batch is None:
        raise UserError("--steps: needs --global-batch, since a step of the planned run is one global batch")
    return {"planned_tokens": None, "planned_steps": settings.steps}


def _validated(data: dict[str, Any], *, source: str, deepspeed_file: str | None = None) -> StudySpec:
    try:
        spec = StudySpec.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join(_complaints(error, source))) from error
    for where, name, value in _knob_values(spec):
        prefix = f"{source}: {where}.{name}" if source else f"{where}.{name}"
        if name not in KNOBS:
            raise UserError(f"{prefix}: unknown knob; {nearest(name, list(KNOBS))}")
        legal(prefix, name, value)
    if spec.workload.model is not None:
        source_of(spec.workload.model)  # a name that means nothing is refused here, with the nearest ones
    if spec.workload.lengths is not None:
        _check_lengths(spec.workload, spec.workload.lengths)
    elif "padding" in spec.pinned:
        raise UserError("padding: all sequences have one length; it needs --lengths")
    _refuse_impossible_batch(spec.workload, spec.pinned)
    spec = _with_deepspeeds(spec, deepspeed_file or f"{source}: workload.deepspeed_config")
    _refuse_idle(spec, spec.pinned)
    return _with_today(_with_ways_to_train(spec))


def _with_ways_to_train(spec: StudySpec) -> StudySpec:
    """``parallel`` is a knob exactly where the workload leaves it open."""
    asked = spec.workload.parallel
    if "parallel" in spec.pinned:
        raise UserError("parallel: is set by --parallel, and --gpus-per-trial with it")
    if "parallel" in spec.space.parameters and asked is not Parallel.AUTO:
        raise UserError("the search space varies parallel: give --parallel auto, and --gpus-per-trial with it")
    if "parallel" in spec.space.parameters or asked is not Parallel.AUTO:
        return spec
    first, *others = spec.workload.legal_ways()
    ways = Choices(choices=(first, *others), default=first, why="Whether sharding, or a second GPU at all, is needed.")
    space = spec.space.model_copy(update={"parameters": {**spec.space.parameters, "parallel": (ways,)}})
    return spec.model_copy(update={"space": space})


def _check_lengths(workload: WorkloadSpec, lengths: str) -> None:
    named = tokenizer_of(workload.model, workload.tokenizer)
    if isinstance(parse_lengths(lengths), Texts) and named is None:
        subject = workload.model or workload.script
        raise UserError(f"--lengths {lengths}: needs --tokenizer HUB_ID|DIR, since {subject} has none")


def _refuse_idle(spec: StudySpec, asked: Mapping[str, KnobValue], prefix: str = "") -> None:
    """What is asked for at another value than the default must mean something beside the rest that is."""
    parallel = spec.workload.parallel
    ways = spec.workload.legal_ways() if parallel is Parallel.AUTO else (parallel,)
    departs = {name: value for name, value in asked.items() if value != KNOBS[name].default}
    for name, value in departs.items():
        way = KNOBS[name].parallel
        if way not in (None, *map(family, ways)):
            flags = " or ".join(one for one in Parallel if family(one) == way)
            raise UserError(f"{prefix}{name}={str(value).lower()}: means nothing without --parallel {flags}")
    if "scope" not in asked:
        return
    fixed = knobs_of(spec.workload.deepspeed_config or {})
    for name in idle({**asked, **({} if parallel is Parallel.AUTO else {"parallel": str(parallel)})}):
        of_some_way = parallel is Parallel.AUTO and KNOBS[name].parallel is not None
        if of_some_way or name in fixed or name not in departs:
            continue
        deciding = (other for other in _DECIDING if other in asked and other != name)
        others = " ".join(f"{other}={asked[other]}" for other in deciding)
        raise UserError(f"{prefix}{name}={str(departs[name]).lower()}: means nothing with {others}")


def _with_today(spec: StudySpec) -> StudySpec:
    """What the user runs today, as a whole config that this workload can be trained with."""
    if spec.against is None:
        return spec
    parallel, today = spec.workload.parallel, {**defaults(), **spec.against}
    ways = spec.workload.legal_ways() if parallel is Parallel.AUTO else (parallel,)
    if spec.against.get("parallel", ways[0]) not in ways:
        raise UserError(f"--against parallel={today['parallel']}: expected {' or '.join(ways)}, as in --parallel")
    today["parallel"] = str(spec.against.get("parallel", ways[0]))
    _refuse_idle(spec, today, "--against ")
    if spec.workload.lengths is None and today["padding"] != KNOBS["padding"].default:
        raise UserError(f"--against padding={today['padding']}: all sequences have one length; it needs --lengths")
    _refuse_impossible_batch(spec.workload, today, "--against ")
    return spec.model_copy(update={"against": today})


def _with_deepspeeds(spec: StudySpec, file: str) -> StudySpec:
    """With what the user's own DeepSpeed settings fix: knobs, and the precision where none was asked for."""
    workload, users = spec.workload, spec.workload.deepspeed_config
    if users is not None:
        for complaint in misfits(users, stage=workload.parallel.zero_stage, precision=workload.precision):
            raise UserError(f"{file}: {complaint}")
        for name, value in knobs_of(users).items():
            if spec.pinned.get(name, value) != value:
                raise UserError(f"--set {name}={str(spec.pinned[name]).lower()}: {file} says {str(value).lower()}")
        if workload.precision is None and (asked := precision_of(users)):
            workload = workload.model_copy(update={"precision": Precision(asked)})
        spec = spec.model_copy(update={"workload": workload, "pinned": {**spec.pinned, **knobs_of(users)}})
    _refuse_idle_deepspeed(spec)
    return spec


def _refuse_idle_deepspeed(spec: StudySpec) -> None:
    stage, users = spec.workload.parallel.zero_stage, spec.workload.deepspeed_config or {}
    asked = {name: value for name, value in spec.pinned.items() if value != knobs_of(users).get(name)}
    if asked.get("deepspeed.deepcompile") and not asked.get("deepspeed.compile"):
        raise UserError("deepspeed.deepcompile=true: means nothing without deepspeed.compile=true")
    if stage is not None:
        for complaint in idle_knobs(spec.pinned, users, stage=stage, device=spec.workload.device):
            raise UserError(complaint)


def _refuse_impossible_batch(workload: WorkloadSpec, asked: Mapping[str, KnobValue], prefix: str = "") -> None:
    """What is asked for must leave something to measure."""
    global_batch, micro_batch = workload.global_batch, asked.get("micro_batch")
    ranks = workload.n_ranks(asked) if "parallel" in asked else workload.gpus_per_trial
    if global_batch is not None and isinstance(micro_batch, int) and global_batch % (micro_batch * ranks):
        each = f" on each of {ranks} GPUs" if ranks > 1 else ""
        raise UserError(f"{prefix}micro_batch={micro_batch}{each} does not divide the global batch of {global_batch}")


def _complaints(error: ValidationError, source: str) -> Iterator[str]:
    for found in error.errors():
        where = ".".join(str(part) for part in found["loc"])
        if not source:
            where = _flag(where)
        message = found["msg"].removeprefix("Value error, ")
        tail = "" if isinstance(found["input"], dict) else f", found {found['input']!r}"
        yield ": ".join(part for part in (source, where, f"{message}{tail}") if part)


def _flag(where: str) -> str:
    """The flag that sets this field, in the words of whoever typed it."""
    if where in ("", "workload"):
        return ""  # several together, which the message names
    field = where.removeprefix("workload.")
    if field in _FLAGS:
        return f"--{_FLAGS[field].replace('_', '-')}"
    return "--sampler" if where.startswith("plan.") else f"--set {field}"


def _knob_values(spec: StudySpec) -> Iterator[tuple[str, str, KnobValue]]:
    configs = spec.plan.configs if isinstance(spec.plan, Paired) else ()
    given = {"pinned": spec.pinned, "against": spec.against or {}}
    for where, knobs in {**given, **{f"plan.configs.{index}": one for index, one in enumerate(configs)}}.items():
        for name, value in knobs.items():
            yield where, name, value
    for name, blocks in spec.space.parameters.items():
        for block in blocks:
            for value in (*block.values(), block.default):
                yield "space.parameters", name, value
