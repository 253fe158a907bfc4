"""The command `autocompile`: one file per command, and the one place where errors become exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autocompile import __version__
from autocompile.cli.doctor import doctor
from autocompile.cli.explain import explain
from autocompile.cli.export import export
from autocompile.cli.gc import gc
from autocompile.cli.models import models
from autocompile.cli.report import report
from autocompile.cli.rm import rm
from autocompile.cli.show import show
from autocompile.cli.studies import studies
from autocompile.cli.tune import tune
from autocompile.errors import AutocompileError

__all__ = ["app", "main"]

app = typer.Typer(
    name="autocompile",
    help="Measure whether torch.compile pays for your training, and with which settings.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's help costs more than all else that --help imports
    pretty_exceptions_enable=False,
)
for command in (tune, studies, show, explain, report, export, rm, gc, models, doctor):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"autocompile {__version__}")
        raise typer.Exit


@app.callback()
def _autocompile(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; our errors are one line on stderr, any other exception keeps its traceback."""
    try:
        app()
    except AutocompileError as error:
        print(f"autocompile: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
