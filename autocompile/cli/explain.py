"""`autocompile explain`: what the compiler did in a study's trials, and what to change."""

from __future__ import annotations

from typing import Annotated

import typer

from autocompile.cli.flags import StorageFlag, StudyArgument
from autocompile.errors import UserError
from autocompile.place import STORAGE


def explain(
    study: StudyArgument,
    storage: StorageFlag = STORAGE,
    trial: Annotated[int | None, typer.Option("--trial", metavar="N", help="This trial alone.")] = None,
) -> None:
    """Say what the compiler did, for the winner and whatever went wrong, and what to change about each cause."""
    from autocompile.cli.stored import read_study
    from autocompile.report.document import places_here
    from autocompile.report.explain import explain as text

    found = read_study(study, storage)
    numbers = [record.number for record in found.records]
    if trial is not None and trial not in numbers:
        known = f"it has trials {numbers[0]} to {numbers[-1]}" if numbers else "it has none yet"
        raise UserError(f"--trial: study {study} has no trial {trial}; {known}")
    print(text(found, places_here(found.spec.workload.script), trial), end="")
