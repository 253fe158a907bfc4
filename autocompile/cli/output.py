"""Where commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_A_FILE = 200  # rich takes 80, which folds names and configs that scripts look for


def console(*, stderr: bool = False) -> Console:
    """Prints text as it is: no markup, no emoji, no colours of numbers."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not found.is_terminal:
        found.width = WIDTH_OF_A_FILE
    return found
