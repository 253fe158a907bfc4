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

    folder = Path(STUDIES, study)
    with open_existing(storage) as opened:
        n_trials = len(load_study(opened, study).records)
        files = f" and the folder {folder}" if folder.is_dir() else ""
        if not yes:
            typer.confirm(f"Delete study {study} with {n_trials} trials{files}?", abort=True)
        opened.delete(study)
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be deleted: {error.strerror}") from error
