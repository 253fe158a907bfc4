"""What a best-config file asks for, field by field, and what a trainer's own format makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from autocompile.best_file import BestConfig
from autocompile.knob_table import KNOBS, KnobValue, family, idle

Fields: TypeAlias = Mapping[str, KnobValue | None]  # None: the file leaves it to whoever uses it


@dataclass(frozen=True, kw_only=True)
class Export:
    """A trainer's file: its text, the environment that carries what it cannot say, and how training is started.

    ``runs`` is what such training runs, with every field of `fields`; ``why`` tells of some of those that differ.
    """

    text: str
    runs: Fields
    suffix: str = ".yaml"  # which readers of such files go by
    environment: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    start: str | None = None
    about: str | None = None  # how the file is used


Format: TypeAlias = Callable[[BestConfig], Export]


@dataclass(frozen=True, kw_only=True)
class Lossy:
    """A field that the format cannot express, and what happens instead; None: whatever the script does."""

    field: str
    wanted: KnobValue
    instead: KnobValue | None
    why: str | None


def fields(best: BestConfig) -> dict[str, KnobValue]:
    """Every knob that means something beside the others, and what else a script has to do as the study did."""
    config = {**{name: knob.default for name, knob in KNOBS.items()}, **best.config, "parallel": best.made_for.parallel}
    idle_knobs = [name for name in idle(config) if KNOBS[name].parallel]
    lora = best.workload.spec.lora
    adapters: dict[str, KnobValue] = {
        "lora.r": lora.r,
        "lora.alpha": lora.alpha,
        "lora.dropout": lora.dropout,
        "lora.targets": "all-linear",
    }
    return {
        **{name: value for name, value in config.items() if name not in idle_knobs},
        "world_size": best.made_for.world_size,
        "gradient_accumulation": best.workload.gradient_accumulation,
        "precision": best.workload.precision,
        "sequence_length": best.made_for.sequence_length,
        "method": best.made_for.method,
        **(adapters if best.made_for.method != "full" else {}),
    }


def lossy(best: BestConfig, exported: Export) -> list[Lossy]:
    """What the export loses, in the order of `fields`."""
    return [
        Lossy(field=name, wanted=wanted, instead=exported.runs[name], why=exported.why.get(name))
        for name, wanted in fields(best).items()
        if exported.runs[name] != wanted
    ]


_OF_A_SCRIPT = ("optimizer", "micro_batch", "padding", "gradient_checkpointing")  # which has to choose, whatever it is


def ranks_left(asked: Mapping[str, KnobValue]) -> tuple[dict[str, KnobValue | None], dict[str, str]]:
    """What of `parallel` is the script's in a trainer on Accelerate, and why. DDP takes nothing but a launcher."""
    way = str(asked["parallel"])
    if way == "none":
        return {}, {}
    if way == "ddp":
        return {}, {"parallel": "Accelerate compiles the wrapped model, where the study wrapped the compiled one"}
    own = [name for name in asked if name.startswith(f"{family(way)}.")]
    how = "name the file of --to deepspeed in it" if family(way) == "deepspeed" else "as its documentation has it"
    return dict.fromkeys(["parallel", *own]), {"parallel": f"set it up in your own file: {how}"}


def carrying(asked: Mapping[str, KnobValue], *names: str) -> dict[str, KnobValue | None]:
    """What runs where a file sets these fields alone: other knobs are as torch has them, all else is the script's."""
    rest = {name: KNOBS[name].default if name in KNOBS and name not in _OF_A_SCRIPT else None for name in asked}
    return {**rest, **{name: asked[name] for name in names if name in asked}}
