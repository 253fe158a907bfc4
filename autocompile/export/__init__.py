"""From a best-config file to the formats of those who train: each with what it loses."""

from __future__ import annotations

from autocompile.best_file import BestConfig
from autocompile.errors import UserError
from autocompile.export.accelerate import accelerate
from autocompile.export.axolotl import axolotl
from autocompile.export.deepspeed import deepspeed
from autocompile.export.env import env
from autocompile.export.fields import Export, Format, Lossy, fields, lossy
from autocompile.export.hf_trainer import hf_trainer
from autocompile.export.llama_factory import llama_factory
from autocompile.export.python import python
from autocompile.export.trl import trl

__all__ = ["FORMATS", "Export", "Lossy", "exported", "fields", "lossy"]

FORMATS: dict[str, Format] = {
    "hf-trainer": hf_trainer,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "axolotl": axolotl,
    "llama-factory": llama_factory,
    "trl": trl,
    "python": python,
    "env": env,
}


def exported(best: BestConfig, to: str) -> Export:
    """Raises UserError for a format that there is none of."""
    if to not in FORMATS:
        raise UserError(f"--to {to}: expected one of {', '.join(FORMATS)}")
    return FORMATS[to](best)
