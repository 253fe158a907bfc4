"""`autocompile show`: one study's table and verdict, or its whole document as JSON."""

from __future__ import annotations

from autocompile.cli.flags import JsonFlag, StorageFlag, StudyArgument
from autocompile.cli.output import console
from autocompile.place import STORAGE


def show(study: StudyArgument, storage: StorageFlag = STORAGE, json: JsonFlag = False) -> None:
    """Show a study: its best configs, its failures and its verdict."""
    from autocompile.cli.stored import print_document, read_study

    found = read_study(study, storage)
    if json:
        print_document(found)
        return
    from autocompile.report.terminal import summary

    console().print(summary(found))
