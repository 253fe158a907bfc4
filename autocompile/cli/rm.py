"""`autocompile rm`: forget a study, its rows and its files."""

from __future__ import annotations

from typing import Annotated

import typer

from autocompile.cli.flags import StorageFlag, StudyArgument
from autocompile.errors import MachineError
from autocompile.place import STORAGE, STUDIES


def rm(
    study: StudyArgument,
    storage: StorageFlag = STORAGE,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a study from its storage, with its folder."""
    import shutil
    from pathlib import Path

    from autocompile.cli.stored import load_study, open_existing
    from autocompile.files import delete_folder
    from autocompile.tuner.leftovers import cache_names, of_study

    folder = Path(STUDIES, study)
    with open_existing(storage) as opened:
        found = load_study(opened, study)
        files = f" and the folder {folder}" if folder.is_dir() else ""
        if not yes:
            typer.confirm(f"Delete study {study} with {len(found.records)} trials{files}?", abort=True)
        opened.delete(study)
        others = [load_study(opened, name) for name in opened.names()]
    shared = {name for other in others for name in cache_names(other.spec, other.facts, other.records)}
    for leftover in of_study(found.spec, found.facts, found.records, folder=folder, shared=shared):
        for one in leftover.folders:  # some lie elsewhere
            delete_folder(one)
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be deleted: {error.strerror}") from error
