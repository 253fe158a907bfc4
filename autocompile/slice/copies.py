"""A workload built once more, small enough to keep, whose training steps are watched instead of taken."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autocompile.knobs import apply_config
from autocompile.slice.cycles import Cycle, cycles
from autocompile.slice.deviation import Step
from autocompile.slice.group import Group
from autocompile.space import Config
from autocompile.spec import MeasureRequest, WorkloadSpec, gradient_accumulation
from autocompile.workloads.job import Context, Job, prepare, trainable
from autocompile.workloads.parallel import EngineStep, Gradient, own_gradient, setup_of, wrapped
from autocompile.workloads.training import moved

STEPS = 3  # compared, each on other batches
_MOST_TRIES = 20  # of a step: fp16's scaler skips some until it has found its scale
_FILLED_STD = 0.01
_DISTURBANCE = 0.2  # of a weight, relative: any code that does not see it gone is far beyond every limit


@dataclass(frozen=True)
class State:
    """Weights and buffers, those that no state dict holds too, on the host; and which modules are in training mode."""

    tensors: Mapping[str, Tensor]
    training: Mapping[str, bool]


class Onlooker(Optimizer):
    """Sees what an optimizer would see, and changes nothing. ``gradient`` tells that of a parameter of the model."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, gradient: Gradient = own_gradient) -> None:
        super().__init__(optimizer.param_groups, {})  # its groups, for a training step that looks at them
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._gradient = gradient
        self.forget()

    def forget(self) -> None:
        self.gradients: dict[str, Tensor] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.look()
        return result

    def look(self) -> None:
        found = ((name, self._gradient(parameter)) for parameter, name in self._names.items())
        self.gradients = {name: _copied(gradient) for name, gradient in found if gradient is not None}


def _copied(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().clone()  # what comes next in the step may write where this one lies


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A job whose weights stay as they are while it trains; the same batches and seeds for each copy.

    ``model`` is the job's, inside of what may be wrapped around it. Of several ranks each has its own micro-batches,
    or, with ``for_all``, one trains on those of all. ``loss`` is then the mean over the ranks all the same.
    """

    job: Job
    model: nn.Module
    onlooker: Onlooker
    n_micro_batches: int
    group: Group
    for_all: bool = False
    seed: int
    device: torch.device
    stepped: Callable[[], None]  # told after each step, for deadlines

    def step(self, batches: Cycle) -> Tensor:
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        return torch.as_tensor(self.job.train_step(self.job.model, batches, self.onlooker)).detach()

    def warm_up_batches(self) -> Iterator[Cycle]:
        """Those that will be compared, over and over."""
        while True:
            yield from itertools.islice(self._cycles(), STEPS)

    def steps(self, *, draw: int = 0) -> Iterator[Step]:
        """The steps to compare; those of another ``draw`` use other random numbers on the same batches."""
        stream = self._cycles()
        for number in range(STEPS):
            torch.manual_seed(self.seed + number)
            batches = next(stream)
            torch.manual_seed(self.seed + number + STEPS * draw)
            yield self._recorded(batches)

    def _cycles(self) -> Iterator[Cycle]:
        for cycle in cycles(self.job, self.n_micro_batches):
            if self.for_all:
                ranks = self.group.gathered(moved(cycle, torch.device("cpu")))
                yield [moved(batch, self.device) for own in ranks for batch in own]
            else:
                yield cycle

    def _recorded(self, batches: Cycle) -> Step:
        """Without gradients if even the last try does not get to the optimizer."""
        self.onlooker.forget()
        before = self._random_state()
        for _ in range(_MOST_TRIES):
            loss = self.step(batches)
            self.stepped()
            if self.onlooker.gradients is not None:
                break
        return Step(
            loss=float(loss) if self.for_all else fmean(self.group.gathered(float(loss))),
            loss_spacing=torch.finfo(loss.dtype).eps if loss.is_floating_point() else 0.0,
            gradients=self.onlooker.gradients or {},
            is_random=not torch.equal(before, self._random_state()),
        )

    def _random_state(self) -> Tensor:
        state = torch.get_rng_state()
        return torch.cat((state, torch.cuda.get_rng_state(self.device))) if self.device.type == "cuda" else state


@dataclass(frozen=True, kw_only=True)
class CopyMaker:
    """Builds the workload of a request once more, with so many layers, as one rank trains it for all."""

    request: MeasureRequest
    device: torch.device
    layers: int | None
    stepped: Callable[[], None]
    group: Group

    def __call__(self) -> Copy:
        """The copy before it must be gone."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        request, device = self.request, self.device
        ctx = Context.of(request.workload, request.config, device=device, seed=request.seed, depth=self.layers)
        job = prepare(ctx.of_rank(self.group.rank), request.workload)
        self.stepped()
        return Copy(
            job=job,
            model=job.model,
            onlooker=Onlooker(job.optimizer(trainable(job.model)), job.model),
            n_micro_batches=gradient_accumulation(request.workload, request.config),
            seed=request.seed,
            device=device,
            group=self.group,
            for_all=self.group.world_size > 1,
            stepped=self.stepped,
        )


def configured(copy: Copy, workload: WorkloadSpec, config: Config) -> Copy:
    """The copy with all knobs, and as its ranks train it."""
    setup = apply_config(setup_of(copy.job, workload), config)
    still = replace(copy.job, optimizer=_standing_still) if workload.parallel.zero_stage is not None else copy.job
    ranks = wrapped(still, setup, n_micro_batches=copy.n_micro_batches)
    onlooker = Onlooker(ranks.optimizer, copy.model, ranks.gradient)
    job = ranks.job
    if isinstance(job.train_step, EngineStep):
        job = replace(job, train_step=replace(job.train_step, before_step=onlooker.look))
    return replace(copy, job=job, onlooker=onlooker, for_all=False)


def _standing_still(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """DeepSpeed's engine takes its step itself."""
    return torch.optim.SGD(parameters, lr=0.0)


def fill_zeros(model: nn.Module) -> None:
    """Give small random values to trained weights that are all zero: what lies before them gets no gradient.

    LoRA's B starts so, and the last projection of a residual branch often does.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable(model):
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _FILLED_STD)


def disturb(model: nn.Module) -> None:
    """Change the trained weights, as training does between the steps, by more than rounding could explain."""
    with torch.no_grad():
        for number, parameter in enumerate(trainable(model)):
            generator = torch.Generator(parameter.device).manual_seed(number)
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
            parameter.mul_(1 + _DISTURBANCE * noise)


def saved_state(model: nn.Module) -> State:
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model)}
    return State(tensors, {name: module.training for name, module in model.named_modules()})


def restore_state(model: nn.Module, state: State) -> None:
    """In place. What is as it was is not written to: a buffer may be an expanded view."""
    for name, module in model.named_modules():
        module.training = state.training.get(name, module.training)  # some modules appear with the first forward
    with torch.no_grad():
        for name, tensor in _tensors(model):
            saved = state.tensors.get(name, tensor).to(tensor.device)
            if not torch.equal(tensor, saved):
                tensor.copy_(saved)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())
