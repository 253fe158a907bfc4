"""What the studies of this folder train: a few layers of Llama-2-7B, with what makes each case special.

Options: ``layers``, and for a quick look on a CPU ``width`` (a multiple of 64).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autocompile

LENGTHS = (64, 128, 192, 256, 320, 384, 448, 512)


def llama(ctx: autocompile.Context) -> autocompile.Job:
    """Equal lengths, no mask."""
    lengths = (ctx.sequence_length,)
    return autocompile.Job(model=_model(ctx), loss=_loss, batches=lambda: _batches(ctx, lengths))


def eight_lengths(ctx: autocompile.Context) -> autocompile.Job:
    """Batches of eight lengths in turn."""
    return autocompile.Job(model=_model(ctx), loss=_loss, batches=lambda: _batches(ctx, LENGTHS))


def padded(ctx: autocompile.Context) -> autocompile.Job:
    """Every second sequence ends in padding, which a mask hides."""

    def batches() -> Iterator[dict[str, Tensor]]:
        for batch in _batches(ctx, (ctx.sequence_length,)):
            mask = torch.ones_like(batch["input_ids"])
            mask[::2, ctx.sequence_length // 2 :] = 0
            labels = batch["labels"].masked_fill(mask == 0, -100)
            yield {**batch, "attention_mask": mask, "labels": labels}

    return autocompile.Job(model=_model(ctx), loss=_loss, batches=batches, mask="padding")


def wrong_gradients(ctx: autocompile.Context) -> autocompile.Job:
    """Compiled, the MLP of the first layer passes a quarter of its gradient; the loss is right."""
    model = _model(ctx)
    model.model.layers[0].mlp = _Quartered(model.model.layers[0].mlp)
    return autocompile.Job(model=model, loss=_loss, batches=lambda: _batches(ctx, (ctx.sequence_length,)))


class _Quartered(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.mlp(inputs)
        return outputs.detach() * 0.75 + outputs * 0.25 if torch.compiler.is_compiling() else outputs


def _model(ctx: autocompile.Context) -> LlamaForCausalLM:
    width = int(ctx.options.get("width", 4096))
    layers = int(ctx.options.get("layers", 4))
    config = LlamaConfig(
        vocab_size=32000 if width == 4096 else 1000,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_attention_heads=width // (128 if width % 128 == 0 and width > 512 else 32),
        num_hidden_layers=min(layers, ctx.depth or layers),
        max_position_embeddings=4096,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(ctx.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(ctx.dtype)
    try:
        with ctx.device:
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _batches(ctx: autocompile.Context, lengths: tuple[int, ...]) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(ctx.seed)
    for length in cycle(lengths):
        ids = torch.randint(0, 1000, (ctx.micro_batch, length), generator=generator).to(ctx.device)
        yield {"input_ids": ids, "labels": ids}
