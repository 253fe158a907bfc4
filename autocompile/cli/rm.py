"""`autocompile rm`: forget a study, its rows and its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autocompile.cli.flags import StorageFlag, StudyArgument
from autocompile.errors import MachineError, UserError
from autocompile.place import STORAGE, STUDIES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from autocompile.report import Study


def rm(
    study: StudyArgument,
    storage: StorageFlag = STORAGE,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a study from its storage, with its folder."""
    from pathlib import Path

    from autocompile.cli.stored import load_study, open_existing

    folder = Path(STUDIES, study)
    with open_existing(storage) as opened:
        found = load_study(opened, study)
        with opened.hold(study):
            pass  # in use elsewhere: refused before anybody is asked, and not held while he thinks
        if not yes:
            _ask(found, folder)
        with opened.hold(study):
            others = [load_study(opened, name) for name in opened.names() if name != study]
            _delete_files(found, others, folder)  # before the rows: what fails half-way can be asked for again
        opened.delete(study)


def _ask(found: Study, folder: Path) -> None:
    files = f" and the folder {folder}" if folder.is_dir() else ""
    try:
        typer.confirm(f"Delete study {found.name} with {len(found.records)} trials{files}?", abort=True)
    except typer.Abort as abort:
        raise UserError(f"study {found.name}: nothing was deleted (--yes does not ask)") from abort


def _delete_files(found: Study, others: Sequence[Study], folder: Path) -> None:
    import shutil

    from autocompile.files import delete_folder
    from autocompile.tuner.leftovers import cache_names, of_study

    shared = {name for other in others for name in cache_names(other.spec, other.facts, other.records)}
    for leftover in of_study(found.spec, found.facts, found.records, folder=folder, shared=shared):
        for one in leftover.folders:  # some lie elsewhere
            delete_folder(one)
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be deleted: {error.strerror}") from error
