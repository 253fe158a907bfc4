"""Amounts, configs and outcomes in the words that every report uses."""

from __future__ import annotations

from autocompile.knob_table import KNOBS, KnobValue
from autocompile.records import Failure, Measurement, State, TrialRecord
from autocompile.space import Config
from autocompile.spec import Facts, StudySpec, Task

_GIB = 1024**3
_MESSAGE_LENGTH = 100


def duration(seconds: float) -> str:
    """``13 s``, ``4 min 10 s``, ``1 h 39 min``, ``2 d 3 h``; parts of the smaller unit are cut off."""
    whole = int(seconds)
    for size, name, small_size, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // small_size} {small_name}"
    return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"


def gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.1f}"


def size(n_bytes: int) -> str:
    """``3 KiB``, ``12 MiB``, ``1.3 GiB``."""
    if n_bytes >= _GIB:
        return f"{gib(n_bytes)} GiB"
    return f"{n_bytes / 1024**2:.0f} MiB" if n_bytes >= 1024**2 else f"{n_bytes / 1024:.0f} KiB"


def tokens(count: int) -> str:
    """``50M``, ``1.5B``, ``200k``, or the number itself where it is no round amount."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            amount = f"{count / size:.1f}"
            return f"{amount.removesuffix('.0')}{letter}"
    return str(count)


def rate(per_second: float) -> str:
    """Tokens per second in three digits at least."""
    if per_second >= 10_000:
        return f"{per_second / 1000:.1f}k"
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.2f}"


def word(value: KnobValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def short(config: Config) -> str:
    """The scope, then what departs from the defaults: ``layer mode=reduce-overhead micro_batch=8``."""
    scope = "eager" if config["scope"] == "none" else word(config["scope"])
    others = [
        f"{name}={word(value)}"
        for name, value in config.items()
        if name != "scope" and (name not in KNOBS or value != KNOBS[name].default)
    ]
    return " ".join([scope, *others])


def workload(spec: StudySpec, facts: Facts) -> str:
    """What is trained and on what, with the method and precision that were decided."""
    asked, device = spec.workload, facts.devices[0]
    count = f"{facts.parameters / 1e9:.1f}B" if facts.parameters >= 1e9 else f"{facts.parameters / 1e6:.1f}M"
    more = f", global batch {asked.global_batch}" if asked.global_batch else ""
    lengths = f"lengths {asked.lengths} up to" if asked.lengths else "sequence length"
    inputs = f"{lengths} {asked.sequence_length}{more}, mask {asked.mask if asked.lengths is None else 'as needed'}"
    if facts.task is Task.IMAGE_CLASSIFICATION:
        inputs = f"images of {f'{asked.image_size} pixels' if asked.image_size else 'the usual size'}{more}"
    places = "GPUs" if device.type == "cuda" else "processes"
    ranks = (
        f"parallel {asked.parallel} on {asked.gpus_per_trial} {places} a trial, " if asked.gpus_per_trial > 1 else ""
    )
    return (
        f"{asked.model or asked.script}: {count} parameters in {facts.layers} layers, {facts.method}, "
        f"{facts.precision}, {inputs}, {ranks}"
        f"on {device.name} ({gib(device.memory_bytes)} GiB)"
    )


def outcome(record: TrialRecord) -> str:
    """What became of a slice, in one line."""
    if record.stopped is not None:
        bound = f" after {duration(record.stopped.bound)}" if record.stopped.bound is not None else ""
        stop = {"budget": "stopped by the budget", "interrupted": "interrupted", "lost": "lost with its process"}
        why = f", {failure_line(record.failure)}" if record.failure is not None else ""
        return f"{stop[record.stopped.reason]}{bound}{why}"
    if record.measurement is not None:
        compared = record.outcome.telemetry.numerics if record.outcome else None
        unchecked = ", numerics not checked" if compared and not compared.checked else ""
        return measurement_line(record.measurement) + unchecked
    if record.failure is not None:
        return failure_line(record.failure)
    return "running" if record.state is State.RUNNING else "no outcome"


def ended(record: TrialRecord) -> str:
    """One trial that ended, in one line."""
    took = f" [{duration(record.seconds)}]" if record.seconds is not None else ""
    return f"trial {record.number} {record.role} {short(record.config)}: {outcome(record)}{took}"


def measurement_line(found: Measurement) -> str:
    step = f"{found.step_seconds.median * 1000:.1f} ms a step"
    peak = [f"peak {gib(found.peak_memory_bytes)} GiB"] if found.peak_memory_bytes is not None else []
    flags = [", ".join(flag.replace("_", " ") for flag in found.degraded)] if found.degraded else []
    return ", ".join([f"{rate(found.tokens_per_second)} {found.unit}/s", step, *peak, *flags])


def failure_line(failure: Failure) -> str:
    kind = f"{failure.kind}/{failure.subkind}" if failure.subkind else str(failure.kind)
    line = " ".join(failure.message.split())
    if len(line) > _MESSAGE_LENGTH:
        line = line[: _MESSAGE_LENGTH - 3] + "..."
    return f"{kind} in {failure.stage}: {line}" + (f" ({failure.where})" if failure.where else "")
