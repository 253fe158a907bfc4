"""Flags that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

StorageFlag = Annotated[str, typer.Option("--storage", metavar="URL", help="Database of the studies.")]
StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="The study's name; see `autocompile studies`.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout at the end.")]
