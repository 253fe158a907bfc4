"""A script that imports a file beside it."""

from __future__ import annotations

import blocks

import autocompile


def build(ctx: autocompile.Context) -> autocompile.Job:
    return blocks.build(ctx)
