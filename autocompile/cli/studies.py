"""`autocompile studies`: what has been tuned so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autocompile.cli.flags import StorageFlag
from autocompile.cli.output import console
from autocompile.place import STORAGE

if TYPE_CHECKING:
    from autocompile.report import Study


def studies(storage: StorageFlag = STORAGE) -> None:
    """List the studies of a storage with their results."""
    from rich.table import Table

    from autocompile.cli.stored import load_study, open_existing

    with open_existing(storage) as opened:
        rows = [_cells(load_study(opened, name)) for name in opened.names()]
    table = Table("study", "result", "trials", "time used")
    table.columns[0].overflow = "fold"  # a name that is cut cannot be given to `show`
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _cells(study: Study) -> tuple[str, ...]:
    from autocompile.report.words import duration

    verdict = study.verdict
    ratio = f" {verdict.speedup_vs_best_eager:.2f}x" if verdict.speedup_vs_best_eager is not None else ""
    result = f"{verdict.result}{ratio}{'' if verdict.confirmed else ' (provisional)'}"
    limit = f" of {duration(study.total_seconds)}" if study.total_seconds is not None else ""
    return study.name, result, str(len(study.records)), f"{duration(study.used_seconds)}{limit}"
