"""Compile small blocks in every way that telemetry has a word for, and print what the observer made of each.

python -m tests.isolation.compile_probe   a JSON object on stdout: {case: telemetry}

Dynamo traces for real; its graphs run as they are, without inductor, which takes no part in any of this.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from autocompile.knob_table import KnobValue
from autocompile.knobs import Setup, apply_config
from autocompile.slice.telemetry import CompileObserver
from autocompile.space import defaults

log = logging.getLogger(__name__)


class Block(nn.Module):
    """``body`` is what it does after its linear layer."""

    def __init__(self, body: Callable[[Block, Tensor], Tensor], index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body
        self.index = index
        self.scale = 0.5 * index
        self.flag = False
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x))


class Net(nn.Module):
    def __init__(self, body: Callable[[Block, Tensor], Tensor], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(body, index) for index in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows(n: int, *, grad: bool = True) -> Tensor:
    return torch.ones(n, 4, requires_grad=grad)


def plain(block: Block, x: Tensor) -> Tensor:
    return x.sin()


def indexed(block: Block, x: Tensor) -> Tensor:
    return x * block.index


def scaled(block: Block, x: Tensor) -> Tensor:
    return x * block.scale


def flagged(block: Block, x: Tensor) -> Tensor:
    return x + 1 if block.flag else x


def remembering(block: Block, x: Tensor) -> Tensor:
    block.seen.append(1)
    return x + len(block.seen)


def dropped(block: Block, x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.1, block.training)


def branching(block: Block, x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x + 1
    return x


def reading(block: Block, x: Tensor) -> Tensor:
    return x * x.sum().item()


def printing(block: Block, x: Tensor) -> Tensor:
    log.debug("a step")
    print("a step", file=sys.stderr)
    return x + 1


@torch.compiler.disable
def undisturbed(x: Tensor) -> Tensor:
    return x + 1


def disabled(block: Block, x: Tensor) -> Tensor:
    return undisturbed(x)


def looping(block: Block, x: Tensor) -> Tensor:
    for _ in range(2):
        torch._dynamo.graph_break()
        x = x + 1
    return x


def filtering(block: Block, x: Tensor) -> Tensor:
    return x[x > 0].sum() + x


def once(model: nn.Module) -> None:
    model(rows(2))


def sizes(model: nn.Module) -> None:
    for n in range(2, 9):
        model(rows(n))


def first_input_without_gradient(model: nn.Module) -> None:
    model(rows(2, grad=False))


def evaluated(model: nn.Module) -> None:
    model(rows(2))
    model.eval()
    model(rows(2))


def without_gradients(model: nn.Module) -> None:
    model(rows(2))
    with torch.no_grad():
        model(rows(2))


def under_autocast(model: nn.Module) -> None:
    model(rows(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(rows(2))


def other_type(model: nn.Module) -> None:
    model(rows(2))
    model.double()
    model(rows(2).double())


def transposed(model: nn.Module) -> None:
    model(rows(4))
    model(torch.ones(4, 4).t().requires_grad_())


def switched(model: nn.Module) -> None:
    model(rows(2))
    for block in model.blocks:  # type: ignore[union-attr]
        block.flag = True
    model(rows(2))


def exchanged(model: nn.Module) -> None:
    model(rows(2))
    for block in model.blocks:  # type: ignore[union-attr]
        block.linear = nn.Sequential(block.linear)
    model(rows(2))


def several(model: nn.Module) -> None:
    for _ in range(5):
        model(rows(2))


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., None], dict[str, KnobValue]]] = {
    "size": (plain, sizes, {"dynamic": "false"}),
    "size over the limit": (plain, sizes, {"dynamic": "false", "cache_size_limit": 3}),
    "size, dynamic": (plain, sizes, {}),
    "requires_grad": (plain, first_input_without_gradient, {}),
    "integer": (indexed, once, {}),
    "integer over the limit": (indexed, once, {"cache_size_limit": 2}),
    "integer over the limit, fullgraph": (indexed, once, {"cache_size_limit": 2, "fullgraph": True}),
    "float": (scaled, once, {}),
    "flag": (flagged, switched, {}),
    "container": (remembering, several, {}),
    "train and eval": (dropped, evaluated, {}),
    "grad mode": (plain, without_gradients, {}),
    "autocast": (plain, under_autocast, {}),
    "type": (plain, other_type, {}),
    "layout": (plain, transposed, {}),
    "class": (plain, exchanged, {}),
    "branch": (branching, once, {}),
    "branch, fullgraph": (branching, once, {"fullgraph": True}),
    "item": (reading, once, {}),
    "print": (printing, once, {}),
    "disable": (disabled, once, {}),
    "loop": (looping, once, {}),
    "filter": (filtering, once, {}),
}


def without_inductor(compile: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(compile)
    def with_eager_backend(function: object, **options: object) -> object:
        return compile(function, backend="eager", **{name: options[name] for name in ("fullgraph", "dynamic")})

    return with_eager_backend


def main() -> None:
    torch.compile = without_inductor(torch.compile)  # type: ignore[assignment]
    found = {}
    with CompileObserver() as observer:
        for name, (body, use, knobs) in CASES.items():
            torch._dynamo.reset()
            observer.restart()
            model = Net(body, depth=4)
            setup = apply_config(
                Setup(model=model, regions={"layer": "blocks.*"}), {**defaults(), "scope": "layer", **knobs}
            )
            observer.groups = setup.groups
            with suppress(RuntimeError, torch._dynamo.exc.FailOnRecompileLimitHit):
                use(model)
            found[name] = observer.telemetry(setup).model_dump(mode="json")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
