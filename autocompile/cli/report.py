"""`autocompile report`: the Markdown report of a study."""

from __future__ import annotations

from autocompile.cli.flags import StorageFlag, StudyArgument
from autocompile.place import STORAGE


def report(study: StudyArgument, storage: StorageFlag = STORAGE) -> None:
    """Print a study's report in Markdown."""
    from autocompile.cli.stored import read_study

    print(read_study(study, storage).report(), end="")
