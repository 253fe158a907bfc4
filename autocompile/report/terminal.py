"""The study for a terminal: rich tables and lines."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autocompile.records import Result
from autocompile.report.sentence import interval, sentence
from autocompile.report.study import Row, Study, best_rows
from autocompile.report.words import failure_line, gib, rate, short

_N_BEST = 6
_COLOURS = {Result.WIN: "bold green", Result.TIE: "bold yellow", Result.LOSS: "bold yellow", Result.NONE: "bold red"}


def summary(study: Study) -> RenderableType:
    """The table of best configs, what failed most, and the verdict."""
    parts: list[RenderableType] = []
    if rows := best_rows(study.records, limit=_N_BEST):
        parts.append(_table(study, rows))
    parts += [Text(line, style="dim") for line in failures(study)]
    if study.brake:
        parts.append(Text(f"no further search: {study.brake}", style="yellow"))
    parts.append(Text(sentence(study), style=_COLOURS[study.verdict.result]))
    if found := interval(study):
        parts.append(Text(f"the ratio lies {found}", style="dim"))
    return Group(*parts)


def failures(study: Study) -> list[str]:
    """One line for each kind of failure, with the first message of its kind, but of configs that were measured too."""
    known = [record.config for record in study.records if record.measurement is not None]
    first: dict[str, tuple[int, str]] = {}
    for record in study.records:
        if record.failure is not None and record.config not in known:
            count, line = first.get(record.failure.kind, (0, f"{short(record.config)}: {failure_line(record.failure)}"))
            first[record.failure.kind] = (count + 1, line)
    return [f"{count} x {line}" if count > 1 else line for count, line in first.values()]


def _table(study: Study, rows: list[Row]) -> Table:
    table = Table(title=escape(study.name), title_justify="left", title_style="bold")
    table.add_column("config", overflow="fold")
    for head in (f"{rows[0].unit}/s", "step ms", "peak GiB", "compile s"):
        table.add_column(head, justify="right")
    table.add_column("state")
    for found in rows:
        won = dict(found.config) == study.verdict.config
        table.add_row(
            escape(short(found.config)),
            rate(found.tokens_per_second),
            f"{found.step_seconds * 1000:.1f}",
            gib(found.peak_memory_bytes) if found.peak_memory_bytes is not None else "-",
            f"{found.compile_seconds:.0f}",
            found.state,
            style="bold" if won else None,
        )
    return table
