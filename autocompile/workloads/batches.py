"""Random batches, made once and cycled through, so that feeding the model costs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from autocompile.workloads.job import Context, Job, MaskKind, WorkloadError
from autocompile.workloads.training import count_tokens, has_tokens

DISTINCT_BATCHES = 8
IGNORED_LABEL = -100  # what transformers' losses leave out

MASKED_SHARE = 0.15  # of the tokens of a masked language model (Devlin et al. 2018, section 3.1)

Batch: TypeAlias = dict[str, Tensor]


def cycled(ctx: Context, make: Callable[[torch.Generator], Batch], dtype: torch.dtype) -> Callable[[], Iterator[Batch]]:
    """An endless cycle of a few batches on the device, the same ones for the same seed and rank.

    ``dtype`` is that of what the model reads where this is no whole number.
    """
    # Drawn on the CPU: a GPU's generator gives other numbers, and seeds should mean the same everywhere.
    generator = torch.Generator().manual_seed(ctx.seed * 1_000_003 + ctx.rank)
    batches = [
        {
            name: tensor.to(ctx.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in make(generator).items()
        }
        for _ in range(DISTINCT_BATCHES)
    ]
    return lambda: itertools.cycle(batches)


def random_tokens(ctx: Context, vocabulary: int, mask: MaskKind, generator: torch.Generator) -> Batch:
    """``input_ids`` and ``labels`` of (micro_batch, sequence_length), and an ``attention_mask`` if one is asked for."""
    shape = (ctx.micro_batch, ctx.sequence_length)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    if mask == "none":
        return {"input_ids": tokens, "labels": tokens.clone()}
    lengths = torch.full((ctx.micro_batch, 1), ctx.sequence_length)
    if mask == "padding":
        # At least one column is padding in every row: an unpadded batch would take the path of no mask.
        half = max(1, ctx.sequence_length // 2)
        lengths = torch.randint(half, ctx.sequence_length, (ctx.micro_batch, 1), generator=generator)
    kept = torch.arange(ctx.sequence_length)[None, :] < lengths
    return {
        "input_ids": tokens.masked_fill(~kept, 0),
        "attention_mask": kept.long(),
        "labels": tokens.masked_fill(~kept, IGNORED_LABEL),
    }


def with_masked_tokens(batch: Batch, mask_token: int, generator: torch.Generator) -> Batch:
    """The batch with some tokens hidden; only these have labels."""
    hidden = torch.rand(batch["input_ids"].shape, generator=generator) < MASKED_SHARE
    hidden[:, 0] = True  # of a short batch none might be, and a mean over nothing is no number
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(hidden, mask_token),
        "labels": batch["labels"].masked_fill(~hidden, IGNORED_LABEL),
    }


def described_by_batch(job: Job) -> Job:
    """The job with the unit it counts and its kind of mask, as its first batch shows them."""
    batch = first_batch(job)
    samples = job.tokens is count_tokens and not has_tokens(batch)
    return replace(job, mask=mask_of(batch), unit="samples" if samples else job.unit)


def first_batch(job: Job) -> Any:
    for batch in job.batches():
        return batch
    raise WorkloadError("batches() ended before its first batch; it should yield as many as are asked for")


def mask_of(batch: Any) -> Literal["none", "ones", "padding"]:
    mask = batch.get("attention_mask") if has_tokens(batch) else None
    if mask is None:
        return "none"
    return "ones" if bool(mask.all()) else "padding"
