"""Does the configured training step still compute the same gradients? Judged on a copy, against fp32 eager.

Three jobs are made one after the other, never two models at once: plain eager in the study's precision, the same in
fp32, and the config with all its knobs. They get equal weights, batches and random seeds, with dropout off, and run
the workload's own training step with its real number of micro-batches, under an optimizer that only looks.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch._dynamo
import torch._inductor.config
from torch.nn.attention import SDPBackend, sdpa_kernel

from autocompile.knob_table import KNOBS
from autocompile.knobs import NotApplicable
from autocompile.records import Deviation, Numerics, Stage
from autocompile.slice.arithmetic import Float32, RoundedAnew, to_float32, without_tf32
from autocompile.slice.copies import (
    STEPS,
    Copy,
    CopyMaker,
    State,
    configured,
    disturb,
    fill_zeros,
    restore_state,
    saved_state,
)
from autocompile.slice.deviation import GRADIENTS, LOSS, Distance, Step, Yardstick, judged, worst_of
from autocompile.slice.measure import Stepper, warm_up
from autocompile.slice.parity import NumericsMismatch, dropout_off
from autocompile.slice.progress import Reporter
from autocompile.slice.telemetry import CompileObserver
from autocompile.slice_plan import SlicePlan
from autocompile.space import Config
from autocompile.spec import Parallel
from autocompile.workloads.job import WorkloadError
from autocompile.workloads.precision import set_tf32
from autocompile.workloads.training import AccumulatedStep

LAYERS = 2  # of a large model's copy
COPIED_WHOLE = 30_000_000  # parameters, up to which the copy is as deep as what was timed: its code is in the cache

_ROOM = 20  # gradients of one step: of three steps they are kept twice, beside a model in fp32 that makes more
_DRAWS = 3  # of roundings, where a config is beyond a limit
_FLOORS = {True: 1e-3, False: 1e-5}  # of relative errors, by whether anything is computed in less than fp32
_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
_UNTIMED = SlicePlan(interval=0.0, window_seconds=0.0, preheat_seconds=0.0)

log = logging.getLogger("autocompile.slice")


class NoReference(Exception):
    """Plain eager training of the copy gives nothing to compare with."""


def check(make: CopyMaker, *, observer: CompileObserver, reporter: Reporter) -> Numerics | None:
    """Compare the config, unless nothing of it can change what is computed.

    The timed model must be gone, and its telemetry taken, since the copies compile too. An exception of the configured
    copy is the config's failure; where there is nothing to compare with, the result says so and blames nobody.
    """
    request, alone = make.request, make.group.world_size == 1
    if not request.numerics or (alone and is_plain_eager(request.config)):
        return None
    began = time.monotonic()
    gc.unfreeze()
    torch._dynamo.reset()  # frees the CUDA graphs, and code that copies share must not use up a recompile limit
    observer.restart()
    found = _compared(make, observer=observer, reporter=reporter)
    whole = make.layers == request.fidelity.layers or not found.steps
    depth = () if whole else (f"on a copy of depth {make.layers}",)
    note = "; ".join((*depth, *([found.note] if found.note else []))) or None
    return found.model_copy(update={"note": note, "seconds": time.monotonic() - began})


def _compared(make: CopyMaker, *, observer: CompileObserver, reporter: Reporter) -> Numerics:
    """Of several ranks none may give up alone, since the others would wait for it: what fails there fails the slice."""
    alone = make.group.world_size == 1
    try:
        reference = _reference(make, tf32=make.request.config.get("float32_matmul_precision") == "high")
    except Exception as error:  # plain eager training failed on a copy, whatever by: not the config's doing
        if not alone and not isinstance(error, NoReference):
            raise
        log.warning("plain eager training of a copy failed", exc_info=True)
        return Numerics(checked=False, note=f"no reference: {_first_line(error)}")
    try:
        errors = _errors(make, reference, observer=observer, reporter=reporter)
    except (torch.OutOfMemoryError, MemoryError, NotApplicable, WorkloadError) as error:
        if not alone:
            raise
        return Numerics(checked=False, note=f"no copy with the config's knobs: {_first_line(error)}")
    return _numerics(errors, _certain(make, reference, errors), reference.notes)


def is_plain_eager(config: Config) -> bool:
    """Only the micro-batch differs from eager training by default, which is what others are compared with."""
    kept = (name for name, knob in KNOBS.items() if not knob.compiles and name != "micro_batch")
    return all(config[name] == KNOBS[name].default for name in kept)


def copied_layers(layers: int | None, parameters: int) -> int | None:
    """Depth of the copy of a model of that many layers, None for all, and parameters."""
    return layers if parameters <= COPIED_WHOLE else min(LAYERS, layers or LAYERS)


def require_close(numerics: Numerics) -> None:
    """Raises NumericsMismatch naming each quantity beyond its limit, the most telling first."""
    beyond = [deviation for deviation in numerics.worst if deviation.is_beyond]
    if beyond:
        raise NumericsMismatch("; ".join(map(_described, reversed(beyond))))


def _described(deviation: Deviation) -> str:
    names = {LOSS: "the loss", GRADIENTS: "all gradients together"}
    what = names.get(deviation.quantity, f"the gradient of {deviation.quantity}")
    if deviation.error is None:
        return f"{what}: missing or not a number"
    return (
        f"{what}: relative error {deviation.error:.2g}, limit {deviation.limit:.2g} "
        f"(eager's own {deviation.eager_error:.2g})"
    )


@dataclass(frozen=True, kw_only=True)
class _Eager:
    """``state`` is what every copy starts from; ``spread`` is what other random numbers change, see Yardstick."""

    state: State
    steps: Sequence[Step]
    spread: Mapping[str, float]
    had_dropout: bool
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """``steps`` are those of fp32 eager, or of eager as it is where that cannot be had."""

    state: State
    steps: Sequence[Step]
    yardstick: Yardstick
    notes: tuple[str, ...]


def _reference(make: CopyMaker, *, tf32: bool) -> _Reference:
    """First in the study's precision, whose weights the others get, then in fp32. With ``tf32``, which the config asks
    for, eager rounds to it too: its own error is what the config's is measured against."""
    notes = []
    with sdpa_kernel(_SDPA):  # one may have been forced for the whole process
        eager = _eager(make, tf32=tf32)
        try:
            steps, low = _in_float32(make, eager.state)
        except Exception as error:  # a kernel may refuse fp32, in whichever way, and does so on all ranks
            if make.group.world_size > 1 and isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise
            log.warning("eager training in fp32 failed", exc_info=True)
            steps, low = eager.steps, True
            notes.append(f"compared with eager, since fp32 failed: {_first_line(error)}")
    if eager.had_dropout:
        notes.append("dropout was off")
    own = _distance(eager.steps, steps, eager.device)
    errors = own.relative()
    if not all(math.isfinite(errors.get(quantity, math.nan)) for quantity in (LOSS, GRADIENTS)):
        raise NoReference("eager's own loss or gradients are not finite, or the training step calls no optimizer")
    yardstick = Yardstick(
        eager=errors,
        shares=own.shares(),
        floor=_FLOORS[low],
        loss_floor=max(step.loss_spacing for step in eager.steps),
        spread=eager.spread,
    )
    return _Reference(state=eager.state, steps=steps, yardstick=yardstick, notes=tuple(notes))


def _eager(make: CopyMaker, *, tf32: bool) -> _Eager:
    copy = make()
    if make.group.world_size > 1 and not isinstance(copy.job.train_step, AccumulatedStep):
        raise NoReference("a workload's own training step may weigh the batches of the ranks in another way")
    set_tf32(allowed=tf32)
    model = copy.job.model
    fill_zeros(model)
    state = saved_state(model)
    with dropout_off(model) as had_dropout:
        steps = [_kept(step, copy.device) for step in copy.steps()]
        spread: Mapping[str, float] = {}
        if make.group.any(any(step.is_random for step in steps)):
            restore_state(model, state)
            changed = _distance(copy.steps(draw=1), steps, copy.device).relative()
            spread = {quantity: change for quantity, change in changed.items() if math.isfinite(change)}
    return _Eager(state=state, steps=steps, spread=spread, had_dropout=had_dropout, device=copy.device)


def _in_float32(make: CopyMaker, state: State) -> tuple[Sequence[Step], bool]:
    """The steps, and whether any of their arithmetic is otherwise done in less."""
    copy = make()
    model = copy.job.model
    restore_state(model, state)
    low = to_float32(model)
    with dropout_off(model), without_tf32(), Float32() as mode:
        steps = [_kept(step, copy.device) for step in copy.steps()]
    return steps, low or mode.replaced


def _kept(step: Step, device: torch.device) -> Step:
    """Where it stays while other models are made: on a GPU with plenty of room, since moving it takes seconds."""
    if device.type == "cuda":
        n_bytes = sum(gradient.nbytes for gradient in step.gradients.values())
        free, _ = torch.cuda.mem_get_info(device)
        if n_bytes * _ROOM < free:
            return step
    return step.on_host()


def _errors(
    make: CopyMaker, reference: _Reference, *, observer: CompileObserver, reporter: Reporter
) -> dict[str, float]:
    """Of the config, once nothing compiles and no CUDA graph is recorded any more.

    It is compiled and recorded with other weights than those it is judged with: training changes them too, and code
    that keeps what it once read must not pass. Inductor draws other random numbers than eager, unless told not to;
    that code is not quite what was timed. Sharded weights are those it is judged with from the start.
    """
    copy = make()
    model = copy.job.model
    restore_state(model, reference.state)
    request = make.request
    whole = request.workload.parallel in (Parallel.NONE, Parallel.DDP)
    if whole:
        disturb(model)
    as_eager = bool(reference.yardstick.spread)
    with dropout_off(model), torch._inductor.config.patch(fallback_random=as_eager):
        copy = configured(copy, request.workload, request.config)
        reporter.enter(Stage.COMPILE)
        _warm_up(copy, observer)
        reporter.enter(Stage.CHECK)
        if whole:
            restore_state(model, reference.state)
        return _distance(copy.steps(), reference.steps, copy.device).relative()


def _certain(make: CopyMaker, reference: _Reference, errors: Mapping[str, float]) -> Yardstick:
    """Before a config is called wrong, eager's own error is taken as the worst of some runs that round otherwise.

    fp32 eager is its own reference, so its error reads 0, and in bf16 that of a parameter of few elements may be
    small by luck; but one element that falls to the other side of a ReLU, or a token to another expert, is no mistake.
    """
    yardstick = reference.yardstick
    beyond = [deviation for deviation in judged(errors, yardstick) if deviation.is_beyond]
    in_doubt = bool(beyond) and all(deviation.error is not None for deviation in beyond)
    if not make.group.of_first(in_doubt):  # ranks may differ in their last bits
        return yardstick
    torch._dynamo.reset()  # frees the CUDA graphs of the config's copy
    try:
        with sdpa_kernel(_SDPA):
            rounded = list(_rounded_anew(make(), reference))
    except (torch.OutOfMemoryError, MemoryError):
        if make.group.world_size > 1:
            raise
        return yardstick
    return replace(yardstick, eager=worst_of(yardstick.eager, *rounded))


def _rounded_anew(copy: Copy, reference: _Reference) -> Iterator[dict[str, float]]:
    with dropout_off(copy.job.model):
        for draw in range(_DRAWS):
            restore_state(copy.job.model, reference.state)
            with RoundedAnew(copy.device, draw):
                errors = _distance(copy.steps(), reference.steps, copy.device).relative()
            yield errors


def _distance(steps: Iterable[Step], reference: Sequence[Step], device: torch.device) -> Distance:
    distance = Distance(device)
    for step, wanted in zip(steps, reference, strict=True):
        distance.add(step, wanted)
    return distance


def _warm_up(copy: Copy, observer: CompileObserver) -> None:
    batches = copy.warm_up_batches()
    stepper = Stepper(
        step=lambda: copy.step(next(batches)),
        watch=observer,
        device=copy.device,
        stepped=copy.stepped,
        waited_seconds=lambda: 0.0,
        nvml=None,
        group=copy.group,
    )
    warm_up(stepper, _UNTIMED)


def _numerics(errors: Mapping[str, float], yardstick: Yardstick, notes: Sequence[str]) -> Numerics:
    worst = judged(errors, yardstick)
    can_tell = worst[1].limit < 1  # else no gradient at all would do
    notes = list(notes)
    if yardstick.spread:
        same = yardstick.same_draws(errors[LOSS])
        notes.append(f"random numbers beside dropout {'as in eager' if same else 'differ from eager and widen limits'}")
    if not can_tell:
        notes.append("no limit below 1 to judge the gradients by")
    return Numerics(checked=can_tell, steps=STEPS, note="; ".join(notes) or None, worst=worst)


def _first_line(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
