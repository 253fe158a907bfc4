"""An encoder whose forward depends on an attribute that is another at each call, and the same one cured.

    autocompile tune --workload studies/examples/changing_attribute.py:build --seq-len 128 --study changing-attribute
    autocompile explain changing-attribute

The masking rate is warmed up by a counter. As a Python number it is a constant of each graph, so each step compiles
anew until the limit is hit, whatever the limit; as a tensor it is an input of one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import autocompile

WARMUP_STEPS = 1000


class CountingLayer(nn.Module):
    """A layer of the encoder that scales what it adds by how far training has come."""

    def __init__(self, layer: nn.Module, *, cured: bool) -> None:
        super().__init__()
        self.layer = layer
        self.cured = cured
        self.step = 0
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, hidden: Tensor, *rest: object, **more: object) -> Tensor:
        if self.cured:
            self.steps += 1
            share = (self.steps / WARMUP_STEPS).clamp(max=1.0).to(hidden.dtype)
        else:
            self.step += 1
            share = min(1.0, self.step / WARMUP_STEPS)
        outputs = self.layer(hidden, *rest, **more)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return hidden + share * (outputs - hidden)


def build(ctx: autocompile.Context) -> autocompile.Job:
    return _job(ctx, cured=False)


def cured(ctx: autocompile.Context) -> autocompile.Job:
    return _job(ctx, cured=True)


def _job(ctx: autocompile.Context, *, cured: bool) -> autocompile.Job:
    """Options: ``layers`` and ``width`` (a multiple of 64), for a quick look on a CPU."""
    width, layers = int(ctx.options.get("width", 768)), int(ctx.options.get("layers", 12))
    config = BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        num_hidden_layers=min(layers, ctx.depth or layers),
    )
    torch.manual_seed(ctx.seed)
    model = BertForMaskedLM(config).to(ctx.device, ctx.dtype).train()
    encoder = model.bert.encoder
    encoder.layer = nn.ModuleList(CountingLayer(layer, cured=cured) for layer in encoder.layer)
    return autocompile.Job(model=model.to(ctx.device), loss=_loss, batches=_batches(ctx, config.vocab_size))


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _batches(ctx: autocompile.Context, vocabulary: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
    def stream() -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(ctx.seed)
        while True:
            ids = torch.randint(vocabulary, (ctx.micro_batch, ctx.sequence_length), generator=generator).to(ctx.device)
            yield {"input_ids": ids, "labels": ids}

    return stream
