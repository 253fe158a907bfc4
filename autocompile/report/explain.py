"""What was asked of the compiler, what it did, and what to do about it: text for a terminal, from records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autocompile.knob_table import KNOBS, records_cuda_graphs
from autocompile.records import Deviation, Failure, Measurement, Numerics, State, Telemetry, TrialRecord
from autocompile.report.advice import Advice, advice
from autocompile.report.advice.guards import kind_of, readable, source_of
from autocompile.report.document import Places, scrub
from autocompile.report.sentence import sentence
from autocompile.report.study import Study
from autocompile.report.words import duration, gib, outcome, short, word

_LABEL = "{:<12}"


def explain(study: Study, places: Places, number: int | None = None) -> str:
    """One trial; without a number the verdict's winner, then each cause of trouble once, where it first showed.

    Paths are relative and hosts unnamed, as in all that can be published, but for the commands, which must run.
    """
    lines = list(_one(study, number) if number is not None else _all(study))
    return "\n".join(line if line.startswith(_COMMAND) else scrub(line, places) for line in lines) + "\n"


def notes(telemetry: Telemetry) -> list[str]:
    """What kept the compiler from one graph a region: each break, eager frame, failed guard and skipped CUDA graph."""
    lines = [
        *(f"graph break at {found.where}: {found.reason}" for found in telemetry.graph_breaks),
        *(f"eager {found.where}: {found.reason}" for found in telemetry.eager_frames),
        *_recompiles(telemetry),
        *(f"CUDA graph skipped: {found.reason}" for found in telemetry.cudagraph_skips),
    ]
    return [" ".join(line.split()) for line in dict.fromkeys(lines)]


def _one(study: Study, number: int) -> Iterator[str]:
    record = next(record for record in study.records if record.number == number)
    yield from _section(record, study)
    yield from _advised(advice(record, study))


def _all(study: Study) -> Iterator[str]:
    winner = _winner(study)
    ordered = [*([winner] if winner else []), *(record for record in study.records if record is not winner)]
    causes = {record.number: advice(record, study) for record in ordered}
    told: set[tuple[str, str]] = set()
    yield f"{study.name}: {sentence(study)}"
    for record in ordered:
        new = [found for found in causes[record.number] if found.key not in told]
        told |= {found.key for found in new}
        if new or record is winner:
            yield ""
            yield from _section(record, study)
            yield from _advised(new, causes)


def _winner(study: Study) -> TrialRecord | None:
    """The last run of the verdict's config that speaks for it."""
    runs = [record for record in study.records if record.measurement and record.config == study.verdict.config]
    confirmed = [record for record in runs if record.number in study.verdict.confirmed_by]
    speaking = confirmed or runs
    return speaking[-1] if speaking else None


def _section(record: TrialRecord, study: Study) -> Iterator[str]:
    won = ", the verdict's config" if record.config == study.verdict.config else ""
    yield f"trial {record.number}, {record.role}{won}: {short(record.config)}"
    for label, text in (*_observed(record), *_compared_elsewhere(record, study)):
        yield f"  {_LABEL.format(label)} {' '.join(text.split())}"


def _compared_elsewhere(record: TrialRecord, study: Study) -> Iterator[tuple[str, str]]:
    """Numerics are compared once for a config, not again in its confirmations."""
    alike = [other for other in study.records if other.config == record.config and other.outcome]
    compared = {other.number: found for other in alike if (found := _numerics_of(other)) is not None}
    if record.measurement is not None and compared and record.number not in compared:
        number, found = next(iter(compared.items()))
        yield "numerics", f"in trial {number}: {_numerics(found)}"


def _numerics_of(record: TrialRecord) -> Numerics | None:
    return record.outcome.telemetry.numerics if record.outcome else None


def _asked(record: TrialRecord) -> str:
    always = ("scope", "micro_batch")
    told = [name for name, value in record.config.items() if name in always or value != KNOBS[name].default]
    return f"{' '.join(f'{name}={word(record.config[name])}' for name in told)}, every other knob at its default"


def _observed(record: TrialRecord) -> Iterator[tuple[str, str]]:
    yield "asked", _asked(record)
    yield "outcome", _failure(record.failure) if record.failure else outcome(record)
    if record.outcome is not None and record.outcome.telemetry != Telemetry():
        yield from _did(record, record.outcome.telemetry)
    elif record.state is not State.RUNNING:
        yield "compiler", "nothing is known: the slice ended before it could tell"
    if record.measurement is not None:
        yield from _machine(record.measurement)


def _did(record: TrialRecord, telemetry: Telemetry) -> Iterator[tuple[str, str]]:
    if record.config["scope"] != "none":
        yield from _compiled(record, telemetry)
    yield "attention", _attention(telemetry, looked=record.measurement is not None)
    if record.config["gradient_checkpointing"]:
        yield "checkpoints", f"{telemetry.checkpointing or 'unknown'} of what is compiled"
    if telemetry.numerics is not None:
        yield "numerics", _numerics(telemetry.numerics)


def _failure(failure: Failure) -> str:
    kind = f"{failure.kind}/{failure.subkind}" if failure.subkind else str(failure.kind)
    return f"{kind} in {failure.stage}: {failure.message}" + (f" ({failure.where})" if failure.where else "")


def _compiled(record: TrialRecord, telemetry: Telemetry) -> Iterator[tuple[str, str]]:
    graphs = "an unknown number of" if telemetry.graphs is None else telemetry.graphs
    spent = ""
    if record.measurement is not None:
        found = record.measurement.compile
        cold = f", {duration(found.cold_seconds)} from an empty one" if found.cache != "cold" else ""
        spent = f"; {duration(found.seconds)} of compile with a cache that was {found.cache}{cold}"
    cut = f", which DDP cut into {telemetry.bucket_graphs} at its buckets" if telemetry.bucket_graphs else ""
    yield "compiled", f"{telemetry.compile_applied or 'unknown'}: {graphs} graphs{cut}{spent}"
    for region in telemetry.regions:
        calls = "" if region.calls is None else f", {region.calls} calls"
        yield "region", f"{region.name}: {region.modules} modules, {region.graphs} graphs{calls}"
    for note in notes(telemetry) or ["no break, no recompile"]:
        yield "compiler", note
    if records_cuda_graphs(record.config) and not telemetry.cudagraph_skips:
        yield "CUDA graphs", "none was skipped"


def _recompiles(telemetry: Telemetry) -> list[str]:
    """One line for each place and thing guarded, with the first of its guards."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for found in telemetry.recompiles:
        alike.setdefault((found.where, kind_of(found.guard), source_of(found.guard)), []).append(found.guard)
    return [
        f"recompile of {where}: {readable(guards[0])}" + (f" (and {len(guards) - 1} more)" if len(guards) > 1 else "")
        for (where, _, _), guards in alike.items()
    ]


def _attention(telemetry: Telemetry, *, looked: bool) -> str:
    """A slice looks at its kernels once it is warm."""
    kernels = ", ".join(telemetry.sdpa_kernels)
    kernels = kernels or ("no fused kernel was seen" if looked else "not looked at before it ended")
    chosen = {"region": "forced in each attention module", "process": "forced for the process", "no": "torch's choice"}
    by = f" ({chosen[telemetry.sdpa_applied]})" if telemetry.sdpa_applied else ""
    return f"{kernels}{by}, mask {telemetry.mask or 'unknown'}"


def _numerics(found: Numerics) -> str:
    note = f"; {found.note}" if found.note else ""
    if not found.checked and not found.worst:
        return f"not compared with an fp32 reference{note}"
    return f"over {found.steps} steps {'; '.join(map(_deviation, found.worst)) or 'nothing differed'}{note}"


def _deviation(found: Deviation) -> str:
    error = "not a number" if found.error is None else f"off by {found.error:.2g}"
    beyond = ", BEYOND IT" if found.is_beyond else ""
    return f"{found.quantity} {error} (eager by {found.eager_error:.2g}, limit {found.limit:.2g}{beyond})"


def _machine(found: Measurement) -> Iterator[tuple[str, str]]:
    if found.gpu is not None:
        held = f", clock held down by {', '.join(found.gpu.limits)}" if found.gpu.limits else ""
        state = f"{found.gpu.sm_clock_mhz} MHz, {found.gpu.power_watts:.0f} W, {found.gpu.temperature_celsius} C"
        yield "GPU", f"{state}{held}"
    if found.peak_memory_bytes_by_rank:
        yield "memory", f"peak of each rank {', '.join(map(gib, found.peak_memory_bytes_by_rank))} GiB"
    if found.mfu is not None:
        yield "MFU", f"{found.mfu:.1%} of a matrix product's speed"
    if found.eval_seconds is not None:
        yield "evaluation", f"{found.eval_seconds * 1000:.1f} ms a step of it, not part of a training step"
    if found.data_wait_seconds is not None:
        share = found.data_wait_seconds / found.step_seconds.median
        yield "data", f"{found.data_wait_seconds * 1000:.1f} ms of a step ({share:.0%}) spent waiting for its batch"
    yield "flags", ", ".join(flag.replace("_", " ") for flag in found.degraded) or "none"


_COMMAND = f"    {_LABEL.format('try')} "


def _advised(found: Sequence[Advice], causes: dict[int, list[Advice]] | None = None) -> Iterator[str]:
    for one in found:
        numbers = [number for number, others in (causes or {}).items() if one.key in [other.key for other in others]]
        also = f" (trials {', '.join(map(str, sorted(numbers)))})" if len(numbers) > 1 else ""
        yield f"  {_LABEL.format('cause')} {one.what}{also}"
        yield f"    {_LABEL.format('change')} {one.change}"
        if one.command is not None:
            yield f"{_COMMAND}{one.command}"
