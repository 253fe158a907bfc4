"""What a model of the catalogue, the Hub or a directory is trained to do: its head, its batches, its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from autocompile.knobs import NotApplicable
from autocompile.spec import Task, WorkloadSpec
from autocompile.workloads.batches import Batch, Rows, packed_tokens, random_tokens, with_masked_tokens
from autocompile.workloads.training import Loss

_DEFAULT_IMAGE_SIZE = 224


def causal_lm_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # The config's default would build a cache whose state guards recompile each layer until the limit.
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def head_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """That of the model's own head for the labels in the batch."""
    loss: Tensor = model(**batch).loss
    return loss


BatchMaker: TypeAlias = Callable[[PreTrainedConfig, WorkloadSpec, Rows, torch.Generator], Batch]


@dataclass(frozen=True, kw_only=True)
class Training:
    """``auto`` is transformers' class that finds the model's own; ``adapters`` is peft's name of the task, if any."""

    auto: Any
    loss: Loss
    batch: BatchMaker
    what: str
    adapters: str | None = None
    reads_tokens: bool = True


def _causal(config: PreTrainedConfig, workload: WorkloadSpec, rows: Rows, generator: torch.Generator) -> Batch:
    """With lengths there is always a mask, as collators make it."""
    if rows.documents is not None:
        return packed_tokens(rows, _vocabulary(config), generator, causal=True)
    return _plain(config, workload, rows, generator)


def _plain(config: PreTrainedConfig, workload: WorkloadSpec, rows: Rows, generator: torch.Generator) -> Batch:
    mask = "ones" if workload.lengths and workload.mask == "none" else workload.mask
    return random_tokens(rows, _vocabulary(config), mask, generator)


def _masked(config: PreTrainedConfig, workload: WorkloadSpec, rows: Rows, generator: torch.Generator) -> Batch:
    if rows.documents is None:
        batch = _plain(config, workload, rows, generator)
    else:
        batch = packed_tokens(rows, _vocabulary(config) - 1, generator, causal=False)
    return with_masked_tokens(batch, _vocabulary(config) - 1, generator)


def _labelled(config: PreTrainedConfig, workload: WorkloadSpec, rows: Rows, generator: torch.Generator) -> Batch:
    if rows.documents is not None:
        raise NotApplicable("padding packed: a classifier has one label for a row, not one for each sequence in it")
    return {**_plain(config, workload, rows, generator), "labels": _labels(config, rows, generator)}


def _images(config: PreTrainedConfig, workload: WorkloadSpec, rows: Rows, generator: torch.Generator) -> Batch:
    side = image_size(config, workload.image_size)
    images = torch.randn(len(rows.lengths), getattr(config, "num_channels", 3), side, side, generator=generator)
    return {"pixel_values": images, "labels": _labels(config, rows, generator)}


def _labels(config: PreTrainedConfig, rows: Rows, generator: torch.Generator) -> Tensor:
    """Classes; or numbers, for a head of one output, which transformers trains as a regression."""
    n, classes = len(rows.lengths), config.num_labels or 1
    if config.problem_type == "multi_label_classification":
        return torch.randint(2, (n, classes), generator=generator).float()
    return torch.randn(n, generator=generator) if classes == 1 else torch.randint(classes, (n,), generator=generator)


def _vocabulary(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


TASKS: Mapping[Task, Training] = {
    Task.CAUSAL_LM: Training(
        auto=AutoModelForCausalLM,
        loss=causal_lm_loss,
        batch=_causal,
        what="a causal language model",
        adapters="CAUSAL_LM",
    ),
    Task.MASKED_LM: Training(auto=AutoModelForMaskedLM, loss=head_loss, batch=_masked, what="a masked language model"),
    Task.CLASSIFICATION: Training(
        auto=AutoModelForSequenceClassification,
        loss=head_loss,
        batch=_labelled,
        what="a classifier of sequences",
        adapters="SEQ_CLS",
    ),
    Task.IMAGE_CLASSIFICATION: Training(
        auto=AutoModelForImageClassification,
        loss=head_loss,
        batch=_images,
        what="a classifier of images",
        reads_tokens=False,
    ),
}
_BY_ENDING = {
    "ForCausalLM": Task.CAUSAL_LM,
    "LMHeadModel": Task.CAUSAL_LM,
    "ForMaskedLM": Task.MASKED_LM,
    "ForSequenceClassification": Task.CLASSIFICATION,
    "ForImageClassification": Task.IMAGE_CLASSIFICATION,
}


def task_of(config: PreTrainedConfig) -> Task:
    """What the published weights were trained for; a causal language model where that says nothing."""
    for architecture in config.architectures or []:
        for ending, task in _BY_ENDING.items():
            if architecture.endswith(ending):
                return task
    return Task.CAUSAL_LM


def image_size(config: PreTrainedConfig, asked: int | None) -> int:
    """Pixels on a side: what is asked for, else what the model was made for."""
    return asked or getattr(config, "image_size", None) or _DEFAULT_IMAGE_SIZE
