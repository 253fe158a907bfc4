"""Environment variables alone, for a script on Accelerate or Trainer that is not to be touched."""

from __future__ import annotations

from autocompile.best_file import BestConfig
from autocompile.export.dynamo import dynamo
from autocompile.export.fields import Export, carrying, fields


def env(best: BestConfig) -> Export:
    """Compile and what inductor reads; all else is the script's."""
    asked = fields(best)
    compiled = dynamo(asked)
    text = "".join(f"export {name}={value}\n" for name, value in compiled.environment.items())
    ranks = {name: None for name in asked if "." in name or name == "parallel"}
    runs = {**carrying(asked), **compiled.runs, **ranks}
    return Export(text=text or "# nothing is compiled\n", runs=runs, suffix=".env", why=compiled.why)
