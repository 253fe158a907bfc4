"""A Hugging Face Trainer as a training job: its model, collator, arguments, optimizer and callbacks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PrinterCallback, ProgressCallback, Trainer, set_seed

from autocompile.spec import Precision
from autocompile.workloads.job import Context, Job, WorkloadError


def job_of(trainer: Trainer, ctx: Context) -> Job:
    """The job that this Trainer's `train` would do, in batches of ``ctx.micro_batch``.

    Raises WorkloadError for arguments that do what the study tunes, or that the study cannot follow.
    """
    _refuse(trainer)
    trainer.args.per_device_train_batch_size = ctx.micro_batch
    trainer._train_batch_size = ctx.micro_batch
    for telling in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(telling)
    trainer.state.max_steps = sys.maxsize  # so that no callback takes a step for the last
    handler = trainer.callback_handler
    trainer.control = handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    model = trainer.accelerator.prepare_model(trainer.model)  # where bf16=True puts its autocast
    return Job(
        model=model.train(),
        loss=_Loss(trainer),
        batches=lambda: _batches(trainer, ctx.seed),
        optimizer=lambda parameters: _optimizer(trainer, parameters),
        train_step=_Step(trainer),
        precision=_precision(trainer, model),
    )


def _refuse(trainer: Trainer) -> None:
    args = trainer.args
    if args.torch_compile:
        raise WorkloadError("Trainer: torch_compile=True in its arguments; leave it off: compile is what is tuned")
    if args.fp16:
        raise WorkloadError("Trainer: fp16=True needs a gradient scaler, which is not followed yet; use bf16=True")
    if args.deepspeed or args.fsdp:
        raise WorkloadError("Trainer: its arguments ask for DeepSpeed or FSDP; a slice trains on one device so far")


def _batches(trainer: Trainer, seed: int) -> Iterator[Any]:
    """One epoch of the Trainer's own loader, shuffled as the seed says."""
    set_seed(seed)
    yield from trainer.get_train_dataloader()


def _optimizer(trainer: Trainer, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """A new one, of the arguments; its parameter groups are the Trainer's."""
    trainer.optimizer = None  # else it is the one there is
    return trainer.create_optimizer()


def _precision(trainer: Trainer, model: nn.Module) -> Precision:
    if trainer.args.bf16:
        return Precision.BF16_MIXED
    low = any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    return Precision.BF16 if low else Precision.FP32


@dataclass(frozen=True)
class _Loss:
    """The Trainer's, collected over nothing: one batch by itself."""

    trainer: Trainer

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(model, self.trainer._prepare_inputs(batch))
        assert isinstance(loss, Tensor)  # without its outputs, for which nobody asked
        return loss


@dataclass(frozen=True)
class _Step:
    """One optimizer step as the Trainer's loop does it; no logging, saving or evaluating, and no schedule."""

    trainer: Trainer

    def __call__(self, model: nn.Module, batches: Sequence[Any], optimizer: Optimizer) -> Tensor:
        trainer, args, on = self.trainer, self.trainer.args, self.trainer.callback_handler
        trainer.current_gradient_accumulation_steps = len(batches)
        items = trainer._get_num_items_in_batch(list(batches), args.device)
        trainer.control = on.on_step_begin(args, trainer.state, trainer.control)
        losses = []
        for batch in batches:
            loss = trainer.training_step(model, batch, items)
            if args.logging_nan_inf_filter and (torch.isnan(loss) or torch.isinf(loss)):
                raise WorkloadError("Trainer: the loss is not finite")
            losses.append(loss.detach())
        if args.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        trainer.control = on.on_pre_optimizer_step(args, trainer.state, trainer.control)
        optimizer.step()
        trainer.control = on.on_optimizer_step(args, trainer.state, trainer.control)
        model.zero_grad()
        trainer.state.global_step += 1
        trainer.control = on.on_step_end(args, trainer.state, trainer.control)
        return torch.stack(losses).sum()
