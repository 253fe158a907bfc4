"""The study as Markdown: what was found, everything that was tried, why some of it failed, and how to use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autocompile.knob_table import KnobValue
from autocompile.records import Measurement, Result, State, Telemetry, TrialRecord
from autocompile.report.document import Places, scrub
from autocompile.report.explain import notes
from autocompile.report.sentence import interval, is_undecided, reference, sentence
from autocompile.report.strategies import Strategy, strategies
from autocompile.report.study import Row, Study, best_rows, measured
from autocompile.report.words import duration, gib, outcome, rate, short, tokens, word, workload

_N_BEST = 8


def markdown(study: Study, places: Places) -> str:
    """The text of ``report.md``; it names no host, no user and no absolute path."""
    sections = [
        [f"# {study.name}", f"**{_capital(sentence(study))}.**", *_sureness(study), *_brake(study), _what(study)],
        ["## Best configs", *_best(study)],
        *_lengths(study),
        *_paddings(study),
        *_strategies(study),
        ["## How to use it", *_use(study)],
        ["## All trials", _table(_TRIAL_HEAD, map(_trial_cells, study.records)), *_derived(study)],
        ["## What the compiler did", *_compiler(study)],
        ["## Environment", _table(("what", "found"), sorted(study.facts.environment.items()))],
    ]
    return scrub("\n\n".join(part for section in sections for part in section), places) + "\n"


_TRIAL_HEAD = ("trial", "role", "state", "config", "what happened")
_CODE = """```python
import autocompile

# after PEFT and .to(), before DDP and the first call
autocompile.apply(model, "best.yaml")
```"""
_SEEN_HEAD = ("graphs", "graph breaks", "recompiles", "CUDA graphs skipped", "attention kernels")
_COMPILER_HEAD = ("trial", "config", "compiled", *_SEEN_HEAD)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sureness(study: Study) -> list[str]:
    verdict, found = study.verdict, interval(study)
    by = [f"Confirmed by trials {', '.join(map(str, verdict.confirmed_by))}"] if verdict.confirmed_by else []
    plain = verdict.speedup_vs_plain_compile
    against = (
        [f"in single runs {plain:.2f}x of plain `torch_compile` (whole model, default mode)"]
        if plain is not None
        else []
    )
    parts = [*by, *([f"the ratio lies {found}"] if found else []), *against]
    return [f"{_capital('; '.join(parts))}."] if parts else []


def _brake(study: Study) -> list[str]:
    return [f"No further search: {study.brake}."] if study.brake else []


def _what(study: Study) -> str:
    limit = f" of {duration(study.total_seconds)}" if study.total_seconds is not None else ""
    return f"{workload(study.spec, study.facts)}. {len(study.records)} slices in {duration(study.used_seconds)}{limit}."


def _best(study: Study) -> list[str]:
    rows = best_rows(study.records, limit=_N_BEST)
    if not rows:
        return ["None was measured."]
    head = ("config", f"{rows[0].unit}/s", "step ms", "peak GiB", "compile s", "trials", "state")
    return [_table(head, map(_best_cells, rows))]


def _best_cells(found: Row) -> tuple[str, ...]:
    return (
        f"`{short(found.config)}`",
        rate(found.tokens_per_second),
        f"{found.step_seconds * 1000:.1f}",
        gib(found.peak_memory_bytes) if found.peak_memory_bytes is not None else "-",
        f"{found.compile_seconds:.0f}",
        ", ".join(map(str, found.trials)),
        found.state,
    )


def _lengths(study: Study) -> list[list[str]]:
    """Compile seconds are charged, so a short run may prefer another config than a long one."""
    if not study.verdict.by_length:
        return []
    rows = [
        (
            f"{run.steps:,}",
            tokens(run.amount),
            f"`{short(run.config)}`",
            duration(run.seconds),
            duration(run.eager_seconds) if run.eager_seconds is not None else "-",
        )
        for run in study.verdict.by_length
    ]
    unit = best_rows(study.records, limit=1)[0].unit
    head = ("steps", unit, "quickest, compile included", "takes", "best eager takes")
    return [["## By length of the run", _table(head, rows)]]


def _paddings(study: Study) -> list[list[str]]:
    """The fastest run of each way to pad sequences of different lengths, and what it made the compiler do."""
    fastest: dict[KnobValue, tuple[TrialRecord, Measurement]] = {}
    for record, found in measured(study.records):
        policy = record.config.get("padding")
        if policy is not None and found.tokens_per_second > _speed(fastest.get(policy)):
            fastest[policy] = record, found
    if study.spec.workload.lengths is None or len(fastest) < 2:
        return []
    rows = [
        (
            policy,
            f"`{short(record.config)}`",
            rate(found.tokens_per_second),
            *_seen_cells(record, _told(record)),
        )
        for policy, (record, found) in sorted(fastest.items(), key=lambda one: -_speed(one[1]))
    ]
    head = ("padding", "fastest config", "tokens/s without padding", *_SEEN_HEAD)
    return [["## By padding", _table(head, rows)]]


def _strategies(study: Study) -> list[list[str]]:
    """All at one global batch; a GPU alone accumulates more micro-batches."""
    found = strategies(study)
    if not found:
        return []
    places = "GPUs" if study.facts.devices[0].type == "cuda" else "processes"
    head = ("parallel", places, "fastest config", "tokens/s", "of one alone", "peak GiB of one", "eager tokens/s")
    return [["## By way to train", _table(head, map(_strategy_cells, found))]]


def _strategy_cells(one: Strategy) -> tuple[str, ...]:
    if one.best is None:
        return one.way, str(one.n_ranks), outcome(one.failed) if one.failed else "-", "-", "-", "-", "-"
    return (
        one.way,
        str(one.n_ranks),
        f"`{short(one.best.config)}`",
        rate(one.best.tokens_per_second),
        f"{one.of_one:.2f}x" if one.of_one else "-",
        gib(one.best.peak_memory_bytes) if one.best.peak_memory_bytes is not None else "-",
        rate(one.eager.tokens_per_second) if one.eager else "-",
    )


def _speed(run: tuple[TrialRecord, Measurement] | None) -> float:
    return run[1].tokens_per_second if run else 0.0


def _told(record: TrialRecord) -> Telemetry:
    return record.outcome.telemetry if record.outcome is not None else Telemetry()


def _use(study: Study) -> list[str]:
    config = study.verdict.config
    if config is None:
        return ["There is nothing to use: no slice ended with a measurement."]
    knobs = ", ".join(f"{name}={word(value)}" for name, value in config.items())
    text = "`best.yaml` beside this file holds the config that training should use:"
    if study.verdict.result is not Result.WIN:
        text = "`best.yaml` beside this file holds the config that the others were compared with:"
        if reference(study) is None:
            text = "`best.yaml` beside this file holds the best eager config:"
            text = text if is_undecided(study) else f"Leave compile off. {text}"
    return [text, f"`{knobs}`", _CODE]


def _trial_cells(record: TrialRecord) -> tuple[str, ...]:
    depth = "" if record.fidelity.layers is None else f" ({record.fidelity.layers} layers)"
    what = outcome(record)
    if record.value_source == "predicted" and record.value is not None:
        what += f", predicted {rate(record.value)}/s at full depth"
    state_word = record.state.lower() if record.state is not State.COMPLETE else "measured"
    return str(record.number), str(record.role), state_word, f"`{short(record.config)}`{depth}", what


def _derived(study: Study) -> list[str]:
    if not study.derived:
        return []
    rows = [(f"`{short(found.config)}`", found.source, found.reason) for found in study.derived]
    return ["Configs that needed no slice:", _table(("config", "how", "why"), rows)]


def _compiler(study: Study) -> list[str]:
    told = [(record, record.outcome.telemetry) for record in study.records if record.outcome is not None]
    if not told:
        return ["No slice came back."]
    lines = [f"- trial {record.number}: {note}" for record, telemetry in told for note in notes(telemetry)]
    table = _table(_COMPILER_HEAD, (_compiler_cells(record, telemetry) for record, telemetry in told))
    return [table, *(["\n".join(lines)] if lines else []), f"`autocompile explain {study.name}` says what to change."]


def _compiler_cells(record: TrialRecord, found: Telemetry) -> tuple[str, ...]:
    applied = "-" if record.config["scope"] == "none" else found.compile_applied or "unknown"
    return str(record.number), f"`{short(record.config)}`", applied, *_seen_cells(record, found)


def _seen_cells(record: TrialRecord, found: Telemetry) -> tuple[str, ...]:
    counts = (found.graphs, len(found.graph_breaks), len(found.recompiles), len(found.cudagraph_skips))
    eager = record.config["scope"] == "none"
    cells = ("-" if eager or count is None else str(count) for count in counts)
    return (*cells, ", ".join(found.sdpa_kernels) or "-")


def _table(head: tuple[str, ...], rows: Iterable[Sequence[KnobValue]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)
