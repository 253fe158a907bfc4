"""`autocompile models`: the architectures that need no download."""

from __future__ import annotations

from autocompile.cli.output import console


def models() -> None:
    """List the models of the catalogue; Hub ids and local directories work as well."""
    from rich.table import Table

    from autocompile.catalogue import catalogue

    table = Table("name", "family", "parameters", "weights (with --weights)")
    table.columns[2].justify = "right"
    for name, architecture in catalogue().items():
        table.add_row(name, architecture.model_type, _amount(architecture.parameters), architecture.hub or "-")
    console().print(table)


def _amount(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
