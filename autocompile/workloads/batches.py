"""Random batches, made once and cycled through, so that feeding the model costs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from autocompile.lengths import packed, padded
from autocompile.workloads.job import Context, Job, MaskKind, WorkloadError
from autocompile.workloads.training import count_tokens, has_tokens

DISTINCT_BATCHES = 8
IGNORED_LABEL = -100  # what transformers' losses leave out

MASKED_SHARE = 0.15  # of the tokens of a masked language model (Devlin et al. 2018, section 3.1)

Batch: TypeAlias = dict[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """The samples of one micro-batch: how many tokens each has, and how many columns the batch.

    ``documents`` are the lengths of the sequences that each row is packed with, where it is.
    """

    lengths: tuple[int, ...]
    width: int
    documents: tuple[tuple[int, ...], ...] | None = None


def rows_of(ctx: Context, lengths: Sequence[int] | None) -> list[Rows]:
    """The micro-batches of one epoch in order, the last partial one included; a few equal ones without ``lengths``."""
    if lengths is None:
        return [Rows((ctx.sequence_length,) * ctx.micro_batch, ctx.sequence_length)] * DISTINCT_BATCHES
    if ctx.padding == "packed":
        rows = packed(lengths, limit=ctx.sequence_length)
        return [Rows(tuple(map(sum, one)), ctx.sequence_length, one) for one in _chunks(rows, ctx.micro_batch)]
    chunks = _chunks(lengths, ctx.micro_batch)
    return [Rows(chunk, padded(max(chunk), policy=ctx.padding, limit=ctx.sequence_length)) for chunk in chunks]


def _chunks(values: Sequence[T], size: int) -> list[tuple[T, ...]]:
    return [tuple(values[start : start + size]) for start in range(0, len(values), size)]


def cycled(
    ctx: Context,
    rows: Sequence[Rows],
    make: Callable[[Rows, torch.Generator], Batch],
    dtype: torch.dtype,
    finished: Callable[[Batch], Batch] = lambda batch: batch,
) -> Callable[[], Iterator[Batch]]:
    """An endless cycle of batches on the device, the same ones for the same seed and rank.

    ``dtype`` is that of what the model reads where this is no whole number; ``finished`` adds what is made each time.
    """
    # Drawn on the CPU: a GPU's generator gives other numbers, and seeds should mean the same everywhere.
    generator = torch.Generator().manual_seed(ctx.seed * 1_000_003 + ctx.rank)
    batches = [
        {
            name: tensor.to(ctx.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in make(each, generator).items()
        }
        for each in rows
    ]
    return lambda: map(finished, itertools.cycle(batches))


def random_tokens(rows: Rows, vocabulary: int, mask: MaskKind, generator: torch.Generator) -> Batch:
    """``input_ids`` and ``labels`` of (samples, width), and an ``attention_mask`` where one is asked for or needed.

    With mask padding and no lengths of their own, rows get random ones of at least half the width.
    """
    shape = (len(rows.lengths), rows.width)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    lengths = torch.tensor(rows.lengths)[:, None]
    if mask == "padding" and bool((lengths == rows.width).all()):
        # At least one column is padding in every row: an unpadded batch would take the path of no mask.
        lengths = torch.randint(max(1, rows.width // 2), rows.width, lengths.shape, generator=generator)
    kept = torch.arange(rows.width)[None, :] < lengths
    if mask == "none" and bool(kept.all()):
        return {"input_ids": tokens, "labels": tokens.clone()}
    return {
        "input_ids": tokens.masked_fill(~kept, 0),
        "attention_mask": kept.long(),
        "labels": tokens.masked_fill(~kept, IGNORED_LABEL),
    }


def packed_tokens(rows: Rows, vocabulary: int, generator: torch.Generator, *, causal: bool) -> Batch:
    """Sequences side by side in rows of (samples, width): ``documents`` tells them apart, until there is a mask.

    No sequence begins with a token to predict, since what comes before it is another one; padding is token 0.
    """
    assert rows.documents is not None
    shape = (len(rows.documents), rows.width)
    document, position = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    for row, lengths in enumerate(rows.documents):
        ends = list(itertools.accumulate(lengths))
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            document[row, end - length : end] = number
            position[row, end - length : end] = torch.arange(length)
    kept = document >= 0
    tokens = torch.randint(1, vocabulary, shape, generator=generator).masked_fill(~kept, 0)
    predicted = kept & (position > 0) if causal else kept
    return {
        "input_ids": tokens,
        "position_ids": position,
        "documents": document,
        "labels": tokens.masked_fill(~predicted, IGNORED_LABEL),
    }


def with_document_mask(batch: Batch, *, causal: bool) -> Batch:
    """The batch with a 4-D mask, true where a token may look. It is large, so that an epoch's would fill the device."""
    documents = batch["documents"]
    seen = documents[:, None, :, None] == documents[:, None, None, :]
    if causal:
        seen = seen & torch.ones_like(seen[0, 0]).tril()
    rest = {name: tensor for name, tensor in batch.items() if name != "documents"}
    return {**rest, "attention_mask": seen}


def count_packed(batch: Batch) -> int:
    """Tokens of the sequences in rows that `packed_tokens` made."""
    return int((batch["input_ids"] != 0).sum())


def with_masked_tokens(batch: Batch, mask_token: int, generator: torch.Generator) -> Batch:
    """The batch with some tokens hidden; only these have labels."""
    hidden = torch.rand(batch["input_ids"].shape, generator=generator) < MASKED_SHARE
    hidden[:, 0] = True  # of a short batch none might be, and a mean over nothing is no number
    hidden &= batch["labels"] != IGNORED_LABEL
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


def mask_of(batch: Any) -> MaskKind:
    mask = batch.get("attention_mask") if has_tokens(batch) else None
    if mask is None:
        return "none"
    if mask.dim() == 4:
        return "packed"
    return "ones" if bool(mask.all()) else "padding"
