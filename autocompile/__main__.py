"""`python -m autocompile` is the command without installation."""

from __future__ import annotations

from autocompile.cli import main

if __name__ == "__main__":
    main()
