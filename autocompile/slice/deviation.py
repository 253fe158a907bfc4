"""How far one training job's loss and gradients lie from another's, and whether that is too far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from autocompile.records import Deviation

LOSS, GRADIENTS = "loss", "gradients"  # all gradients together; any other quantity is a parameter's name

_NOTHING = 1e-6  # share of the whole gradient's norm, below which a parameter's gradient is rounding noise
_FACTOR, _PARAMETER_FACTOR = 2.0, 4.0  # of eager's own error
_PARAMETER_FLOORS = 10.0
_SPREADS = 5.0  # what other random numbers change is known from one draw only


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step saw: the loss, and the gradient of each parameter that has one.

    ``loss_spacing`` is the relative distance of neighbouring numbers in the loss's own dtype, ``is_random`` whether
    random numbers were drawn.
    """

    loss: float
    loss_spacing: float
    gradients: Mapping[str, Tensor]
    is_random: bool

    def on_host(self) -> Step:
        """To be kept while other models are made."""
        return replace(self, gradients={name: gradient.cpu() for name, gradient in self.gradients.items()})


class Distance:
    """Relative L2 distance of one job's steps from another's, over all steps added, by quantity; computed there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._apart: defaultdict[str, float] = defaultdict(float)  # squared, as is the next
        self._size: defaultdict[str, float] = defaultdict(float)
        self._missing: set[str] = set()

    def add(self, step: Step, reference: Step) -> None:
        self._add(LOSS, (step.loss - reference.loss) ** 2, reference.loss**2)
        for name in step.gradients.keys() - reference.gradients.keys():
            self._add(GRADIENTS, _squared(self._here(step.gradients[name])), 0.0)
        for name, gradient in reference.gradients.items():
            wanted, found = self._here(gradient), step.gradients.get(name)
            size = _squared(wanted)
            apart = size if found is None else _squared(self._here(found) - wanted)
            if found is None and size > 0:
                self._missing.add(name)
            for quantity in (GRADIENTS, name):
                self._add(quantity, apart, size)

    def relative(self) -> dict[str, float]:
        """Infinite for a gradient that is not there."""
        return {
            name: math.inf if name in self._missing else _ratio(self._apart[name], size)
            for name, size in self._size.items()
        }

    def shares(self) -> dict[str, float]:
        """Of the norm of the reference's whole gradient, by parameter."""
        whole = self._size[GRADIENTS]
        return {name: _ratio(size, whole) for name, size in self._size.items() if name not in (LOSS, GRADIENTS)}

    def _here(self, gradient: Tensor) -> Tensor:
        return gradient.to(self._device, torch.float32)

    def _add(self, quantity: str, apart: float, size: float) -> None:
        self._apart[quantity] += apart
        self._size[quantity] += size


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What an error is measured against; all but the floors are relative errors, by quantity.

    ``eager`` is that of plain eager in the study's precision, ``spread`` is what other random numbers change in it,
    empty where the workload draws none.
    """

    eager: Mapping[str, float]
    shares: Mapping[str, float]  # of the reference's whole gradient, by parameter
    floor: float
    loss_floor: float
    spread: Mapping[str, float] = field(default_factory=dict)

    def limit(self, quantity: str, *, same_draws: bool) -> float:
        own = self.eager[quantity]
        if quantity == LOSS:
            narrow = max(_FACTOR * own, self.floor, self.loss_floor)
        elif quantity == GRADIENTS:
            narrow = max(_FACTOR * own, self.floor)
        else:
            narrow = max(_PARAMETER_FACTOR * own, _PARAMETER_FLOORS * self.floor)
        return narrow if same_draws else max(narrow, _SPREADS * self._spread(quantity))

    def same_draws(self, loss_error: float) -> bool:
        """Whether a config drew eager's random numbers: others would show in the loss, if they can at all."""
        narrow = self.limit(LOSS, same_draws=True)
        return loss_error <= narrow and self.spread.get(LOSS, 0.0) > _SPREADS * narrow

    def _spread(self, quantity: str) -> float:
        """A parameter of few elements may have changed little by luck, so all gradients speak for it too."""
        own = self.spread.get(quantity, 0.0)
        return own if quantity == LOSS else max(own, self.spread.get(GRADIENTS, 0.0))


def worst_of(errors: Mapping[str, float], *others: Mapping[str, float]) -> dict[str, float]:
    """The largest error of each quantity of the first, infinite ones of the others left out."""
    finite = {name: [other[name] for other in others if math.isfinite(other[name])] for name in errors}
    return {name: max([error, *finite[name]]) for name, error in errors.items()}


def judged(errors: Mapping[str, float], yardstick: Yardstick) -> tuple[Deviation, ...]:
    """The loss, all gradients together, and the parameter that is nearest to its limit or furthest beyond it.

    Left out are parameters whose gradient is numerically zero in the reference, or no number in eager.
    """
    same_draws = yardstick.same_draws(errors[LOSS])

    def deviation(quantity: str) -> Deviation:
        error, limit = errors[quantity], yardstick.limit(quantity, same_draws=same_draws)
        finite = error if math.isfinite(error) else None
        return Deviation(quantity=quantity, error=finite, eager_error=yardstick.eager[quantity], limit=limit)

    told = [name for name, share in yardstick.shares.items() if share > _NOTHING]
    parameters = [deviation(name) for name in told if math.isfinite(yardstick.eager[name])]
    return deviation(LOSS), deviation(GRADIENTS), *sorted(parameters, key=_nearness)[-1:]


def _nearness(deviation: Deviation) -> float:
    return math.inf if deviation.error is None else deviation.error / deviation.limit


def _squared(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _ratio(apart: float, size: float) -> float:
    if size == 0:
        return 0.0 if apart == 0 else math.inf
    return math.sqrt(apart / size)
