"""Put a config onto a training job; the same code configures a measured slice and a user's script."""

from __future__ import annotations

# Importing a file registers its knobs, and the order of these lines is the order of application.
# isort: off
from autocompile.knobs import batch as batch
from autocompile.knobs import attention as attention
from autocompile.knobs import checkpointing as checkpointing
from autocompile.knobs import gradients as gradients
from autocompile.knobs import vision as vision
from autocompile.knobs import compilation as compilation
from autocompile.knobs import inductor as inductor
from autocompile.knobs import ranks as ranks
from autocompile.knobs import scope as scope

# isort: on
from autocompile.knobs.setup import REGISTRY, NotApplicable, Setup, apply_config, default_regions

__all__ = ["REGISTRY", "NotApplicable", "Setup", "apply_config", "default_regions"]
