"""The two values between a workload and the rest: `Context` says what to build, `Job` is what was built."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from autocompile.knob_table import KNOBS, KnobValue
from autocompile.lengths import Listed, Texts, epoch, parse_lengths
from autocompile.space import Config
from autocompile.spec import Precision, WorkloadSpec
from autocompile.workloads.precision import (
    is_mixed,
    resolved_precision,
    set_tf32,
    step_under_autocast,
    trained_dtype,
    under_autocast,
)
from autocompile.workloads.training import AccumulatedStep, Loss, TrainStep, count_tokens, fused_adamw, optimizer_of

__all__ = ["Context", "Job", "MachineFault", "WorkloadError", "prepare", "trainable"]

EPOCH_LENGTHS = 256  # at most: a window holds whole epochs, and all their batches lie on the device

MaskKind: TypeAlias = Literal["none", "ones", "padding", "packed"]


class WorkloadError(Exception):
    """The user's model or script cannot be trained. ``where`` is file:line of the user's code, if it is known."""

    def __init__(self, message: str, *, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where


class MachineFault(Exception):
    """This machine cannot run the workload; the message names what is missing and how to mend it."""

    def __init__(self, message: str, *, subkind: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.subkind = subkind  # of the failure it becomes


def lengths_of(workload: WorkloadSpec, *, seed: int) -> list[int] | None:
    """Those of one epoch's sequences in order, of a file the first; None where all have the sequence length."""
    if workload.lengths is None:
        return None
    found = parse_lengths(workload.lengths)
    if isinstance(found, Texts):
        from autocompile.workloads.texts import token_counts

        found = Listed(token_counts(found, workload))
    return epoch(found, longest=workload.sequence_length, seed=seed, n=EPOCH_LENGTHS)


class Replayed(Iterator[int]):
    """The lengths of an epoch, ``once``, over and over; each ``iter()`` begins anew, as a stream begun again has to."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.once = lengths
        self._going_on = itertools.cycle(lengths)

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(self.once)

    def __next__(self) -> int:
        return next(self._going_on)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What to build. ``dtype`` is that of the trainable weights; ``depth`` limits the layers, None is all of them.

    ``lengths`` repeat without end what `--lengths` asked for, none of them above ``sequence_length``, and begin anew
    with each ``iter(ctx.lengths)``; ``padding`` and ``optimizer`` are the knobs of these names. Of ``world_size`` ranks
    that train together each builds equal weights, for the same seed, and batches of its own.
    """

    device: torch.device
    dtype: torch.dtype
    micro_batch: int
    sequence_length: int
    lengths: Replayed | None = None
    depth: int | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    options: Mapping[str, KnobValue] = field(default_factory=dict)
    padding: str = "longest"
    optimizer: str = "adamw_torch_fused"

    @classmethod
    def of(
        cls, workload: WorkloadSpec, config: Config, *, device: torch.device, seed: int, depth: int | None = None
    ) -> Context:
        """The context of one slice of this workload; of the config the batch's knobs matter."""
        lengths = lengths_of(workload, seed=seed)
        return cls(
            device=device,
            dtype=torch.float32 if workload.trainer else trained_dtype(resolved_precision(workload, device.type)),
            micro_batch=int(config["micro_batch"]),
            sequence_length=workload.sequence_length,
            lengths=None if lengths is None else Replayed(lengths),
            padding=str(config.get("padding", KNOBS["padding"].default)),
            optimizer=str(config.get("optimizer", KNOBS["optimizer"].default)),
            depth=depth,
            seed=seed,
            world_size=workload.gpus_per_trial,
            options=workload.options,
        )

    def of_rank(self, rank: int) -> Context:
        """What this rank builds: equal weights, and its own part of the sequences, as many for each rank."""
        if self.lengths is None or self.world_size == 1:
            return replace(self, rank=rank)
        whole = self.lengths.once
        even = max(1, len(whole) // self.world_size) * self.world_size
        return replace(self, rank=rank, lengths=Replayed(whole[:even][rank :: self.world_size] or whole))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job. Only the first three fields are required; `prepare` fills in what a workload leaves out.

    ``loss(model, batch)`` must call the model that it is given, not a part of it or a reference of its own: compile
    in place acts on the module's call. ``batches()`` starts anew, with the same batches for the same seed, and yields
    as many as are asked for. ``train_step(model, batches, optimizer)`` is one whole optimizer step over the list of
    its micro-batches. ``tokens(batch)`` may wait for the device, so call it outside what is timed. ``epoch``, where it
    is known, is the number of micro-batches after which the stream repeats.
    """

    model: nn.Module
    loss: Loss
    batches: Callable[[], Iterator[Any]]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = fused_adamw
    train_step: TrainStep = field(default_factory=AccumulatedStep)
    tokens: Callable[[Any], int] = count_tokens
    regions: Mapping[str, str] = field(default_factory=dict)  # scope name -> fnmatch pattern on dotted module names
    unit: Literal["tokens", "samples"] = "tokens"  # what `tokens` counts
    mask: MaskKind = "none"
    epoch: int | None = None
    precision: Precision = Precision.FP32

    def __post_init__(self) -> None:
        """The default step follows the loss, also through `dataclasses.replace`."""
        if isinstance(self.train_step, AccumulatedStep):
            object.__setattr__(self, "train_step", self.train_step.of(self.loss))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer gets: with adapters a small part of the parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def prepare(ctx: Context, workload: WorkloadSpec) -> Job:
    """Build the workload, complete in every field and ready to train. Raises WorkloadError."""
    # Imported here, since these import this module; and only what is needed, since transformers takes seconds.
    from autocompile.knobs import default_regions
    from autocompile.workloads.batches import described_by_batch

    set_tf32(allowed=False)
    precision = resolved_precision(workload, ctx.device.type)
    job = _built(ctx, workload)
    if job.optimizer is fused_adamw:  # the workload leaves it to us
        job = replace(job, optimizer=optimizer_of(ctx.optimizer, ctx.device))
    job = described_by_batch(job if workload.trainer else _in_precision(job, precision, ctx.device))
    return job if job.regions else replace(job, regions=default_regions(job.model))


def _built(ctx: Context, workload: WorkloadSpec) -> Job:
    if workload.script:
        from autocompile.workloads import scripts

        return scripts.build(ctx, workload)
    from autocompile.workloads import models

    return models.build(ctx, workload)


def _in_precision(job: Job, precision: Precision, device: torch.device) -> Job:
    """The job with its loss under autocast, and with a gradient scaler for fp16, as its precision wants it."""
    job = replace(job, precision=precision)
    if not is_mixed(precision):
        return job
    job = replace(job, loss=under_autocast(job.loss, precision, device))
    if not isinstance(job.train_step, AccumulatedStep):
        if precision is Precision.FP16_MIXED:
            raise WorkloadError("fp16-mixed needs a gradient scaler in the step; a workload's own train_step has none")
        return replace(job, train_step=step_under_autocast(job.train_step, precision, device))
    if precision is not Precision.FP16_MIXED:
        return job
    return replace(job, train_step=replace(job.train_step, scaler=torch.amp.GradScaler(device.type)))
