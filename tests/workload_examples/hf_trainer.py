"""A Hugging Face Trainer as a user writes it: an encoder, a collator that pads, a callback."""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from autocompile import Context

EXAMPLES = 24


class StepsBegun(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_begin(self, args: object, state: object, control: object, **rest: object) -> None:
        self.steps += 1


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row["input_ids"])] = row["input_ids"]
        mask[index, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([row["label"] for row in rows])}


def build(ctx: Context, **arguments: object) -> Trainer:
    torch.manual_seed(ctx.seed)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_labels=3
    )
    generator = torch.Generator().manual_seed(ctx.seed)
    rows = [
        {
            "input_ids": torch.randint(1, 64, (6 + index % 5,), generator=generator),
            "label": torch.randint(3, (), generator=generator),
        }
        for index in range(EXAMPLES)
    ]
    defaults = {"use_cpu": True, "report_to": "none", "remove_unused_columns": False, "learning_rate": 1e-3}
    return Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(output_dir=tempfile.mkdtemp(), **{**defaults, **arguments}),
        train_dataset=rows,
        data_collator=collate,
        callbacks=[StepsBegun()],
    )


def mixed(ctx: Context) -> Trainer:
    return build(ctx, bf16=True)


def compiled(ctx: Context) -> Trainer:
    return build(ctx, torch_compile=True)


def half(ctx: Context) -> Trainer:
    return build(ctx, fp16=True)


def model_alone(ctx: Context) -> object:
    return build(ctx).model


def accumulating(ctx: Context) -> Trainer:
    return build(ctx, gradient_accumulation_steps=8)


def checkpointed(ctx: Context) -> Trainer:
    return build(ctx, activation_checkpointing=True)


def with_sgd(ctx: Context) -> Trainer:
    trainer = build(ctx)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    return trainer
