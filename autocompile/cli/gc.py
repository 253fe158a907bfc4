"""`autocompile gc`: free the disk of what studies leave behind and nothing needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autocompile.cli.flags import StorageFlag
from autocompile.errors import UserError
from autocompile.place import STORAGE, STUDIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack

    from autocompile.report import Study
    from autocompile.storage import Storage
    from autocompile.tuner.leftovers import Leftover

Studies = Annotated[list[str] | None, typer.Argument(metavar="[STUDY...]", help="[default: all that nobody runs]")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be freed, and free nothing.")]


def gc(studies: Studies = None, storage: StorageFlag = STORAGE, dry_run: DryRun = False) -> None:
    """Free compile caches of studies that nobody runs, folders of trials that are none, and abandoned workplaces.

    What was measured stays: specs, facts, best configs, reports, and each trial's request, outcome and log.
    """
    from autocompile.files import delete_folder
    from autocompile.report.words import size

    total = 0
    for whose, found in _leftovers(studies or [], storage):
        if not found.folders:
            continue
        n_bytes = found.n_bytes
        total += n_bytes
        print(f"{whose}: {len(found.folders)} {found.what}, {size(n_bytes)}")
        for folder in () if dry_run else found.folders:
            delete_folder(folder)
    print(f"{size(total)} {'would be freed' if dry_run else 'freed'}")


def _leftovers(wanted: Sequence[str], url: str) -> Iterator[tuple[str, Leftover]]:
    """With whose they are; each study is held until the next is asked for, so that nobody begins to run it."""
    from contextlib import ExitStack
    from pathlib import Path

    from autocompile.cli.stored import load_study, open_existing
    from autocompile.storage import exists
    from autocompile.tuner.leftovers import abandoned, usual_places

    studies: list[Study] = []
    if wanted or exists(url):
        with open_existing(url) as opened, ExitStack() as held:
            for name in wanted:
                load_study(opened, name)  # refused before anything is freed
            studies = [load_study(opened, name) for name in opened.names()]
            yield from _of_studies(studies, _held(opened, held, studies, wanted))
    roots = [Path(study.spec.cache_root) for study in studies if study.spec.cache_root]
    for found in abandoned(usual_places(Path(STUDIES), roots)):
        yield STUDIES, found


def _held(opened: Storage, held: ExitStack, studies: Sequence[Study], wanted: Sequence[str]) -> list[Study]:
    """Those asked for, or all, that nobody else runs."""
    found = []
    for study in studies:
        if wanted and study.name not in wanted:
            continue
        try:
            held.enter_context(opened.hold(study.name))
        except UserError as error:
            if wanted:
                raise
            print(f"{error}: left alone")
        else:
            found.append(study)
    return found


def _of_studies(studies: Sequence[Study], free: Sequence[Study]) -> Iterator[tuple[str, Leftover]]:
    from pathlib import Path

    from autocompile.tuner.leftovers import cache_names, of_study

    others = [study for study in studies if study not in free]
    shared = {name for study in others for name in cache_names(study.spec, study.facts, study.records)}
    for study in free:
        folder = Path(STUDIES, study.name)
        for found in of_study(study.spec, study.facts, study.records, folder=folder, shared=shared):
            yield study.name, found
