"""A Hugging Face Trainer as a training job: its model, collator, arguments, optimizer and callbacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PrinterCallback, ProgressCallback, Trainer, set_seed
from transformers.trainer_utils import has_length

from autocompile.spec import Precision
from autocompile.workloads.job import Context, Job, WorkloadError


def job_of(trainer: Trainer, ctx: Context) -> Job:
    """The job that this Trainer's `train` would do, in batches of ``ctx.micro_batch``.

    Raises WorkloadError for arguments that do what the study tunes, or that the study cannot follow.
    """
    _refuse(trainer, ctx)
    given = trainer.optimizer
    trainer.args.per_device_train_batch_size = ctx.micro_batch
    trainer._train_batch_size = ctx.micro_batch
    handler = trainer.callback_handler
    handler.callbacks = [callback for callback in handler.callbacks if not _reports(callback)]
    trainer.state.max_steps = sys.maxsize  # so that no callback takes a step for the last
    trainer.control = handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    model = trainer.accelerator.prepare_model(trainer.model)  # where bf16=True puts its autocast
    return Job(
        model=model.train(),
        loss=_Loss(trainer),
        batches=lambda: _batches(trainer, ctx.seed),
        epoch=len(trainer.get_train_dataloader()) if has_length(trainer.train_dataset) else None,
        optimizer=lambda parameters: given or _optimizer(trainer),
        train_step=_Step(trainer),
        precision=_precision(trainer, model),
    )


def _refuse(trainer: Trainer, ctx: Context) -> None:
    """What `train` alone switches on, or what the study decides, must not be dropped in silence."""
    args = trainer.args
    checkpoints = args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)  # its newer name
    complaints = {
        "torch_compile=True: leave it off, compile is what is tuned": args.torch_compile,
        "fp16=True needs a gradient scaler, which is not followed yet; use bf16=True": args.fp16,
        "DeepSpeed and FSDP: a slice trains on one device so far": args.deepspeed or args.fsdp,
        "gradient_accumulation_steps: leave it at 1 and pass --global-batch": args.gradient_accumulation_steps != 1,
        "activation_checkpointing=True: leave it off, it is a knob": checkpoints,
        "neftune_noise_alpha is not followed": args.neftune_noise_alpha,
        "tf32=True: leave it off, float32_matmul_precision is a knob": args.tf32,
    }
    for complaint, holds in complaints.items():
        if holds:
            raise WorkloadError(f"Trainer's arguments: {complaint}")
    if args.device.type != ctx.device.type:
        hint = "; give its arguments use_cpu=True" if ctx.device.type == "cpu" else ""
        raise WorkloadError(f"Trainer: it trains on {args.device}, this study on {ctx.device}{hint}")


def _reports(callback: object) -> bool:
    """To a terminal or a service: each slice would be another run there, and may be asked for a login."""
    telling = isinstance(callback, ProgressCallback | PrinterCallback)
    return telling or type(callback).__module__.startswith("transformers.integrations")


def _batches(trainer: Trainer, seed: int) -> Iterator[Any]:
    """One epoch of the Trainer's own loader, shuffled as the seed says."""
    set_seed(seed)
    yield from trainer.get_train_dataloader()


def _optimizer(trainer: Trainer) -> Optimizer:
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
    """One optimizer step as the Trainer's loop does it; nothing is logged, saved or evaluated, no rate scheduled."""

    trainer: Trainer

    def __call__(self, model: nn.Module, batches: Sequence[Any], optimizer: Optimizer) -> Tensor:
        trainer, args, on = self.trainer, self.trainer.args, self.trainer.callback_handler
        trainer.current_gradient_accumulation_steps = len(batches)
        items = trainer._get_num_items_in_batch(list(batches), args.device)
        trainer.control = on.on_step_begin(args, trainer.state, trainer.control)
        losses = []
        for batch in batches:
            loss = trainer.training_step(model, batch, items)
            if args.logging_nan_inf_filter:
                bool(torch.isnan(loss) or torch.isinf(loss))  # the Trainer waits for the loss here
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
