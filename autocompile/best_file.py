"""The best-config file: what is in it, reading and writing it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError

from autocompile.errors import UserError
from autocompile.knob_table import KnobValue
from autocompile.spec import WorkloadSpec
from autocompile.values import Value, parse_yaml, read_text, write_aside


class Expected(Value):
    """What the study measured for its config: [median, low, high] where a list, units in the names."""

    tokens_per_second: tuple[float, float, float]
    step_seconds: tuple[float, float, float]
    peak_memory_bytes: int | None
    compile_seconds: float
    graphs: int | None


class Evidence(Value):
    """Ratios of the verdict; null where the study could not measure one. ``confirmed_by`` are trial numbers."""

    speedup: float | None
    speedup_vs_best_eager: float | None
    confirmed_by: tuple[int, ...]
    break_even_steps: int | None


class MadeFor(Value):
    """Where the config holds. Versions are strings, major.minor."""

    gpu: str
    torch: str
    triton: str | None
    method: str
    model_type: str | None
    parallel: str
    world_size: int
    sequence_length: int


class BestWorkload(Value):
    """The training that was measured; ``spec`` is the whole WorkloadSpec, so that it can be built again."""

    micro_batch: int
    gradient_accumulation: int
    precision: str
    spec: WorkloadSpec
    regions: dict[str, str] | None = None  # of a user's script, which may name its own


class BestConfig(Value):
    """The file ``best.yaml``, format 1."""

    format: Literal[1] = 1
    study: str
    result: Literal["win", "tie", "loss"]
    config: dict[str, KnobValue]
    expected: Expected
    evidence: Evidence
    made_for: MadeFor
    workload: BestWorkload


def load(path: str | Path) -> BestConfig:
    """Raises UserError with the file and the field for anything that is not a best-config file."""
    try:
        return BestConfig.model_validate(parse_yaml(read_text(Path(path)), source=str(path)))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error


def save(best: BestConfig, path: Path) -> None:
    """Written aside and renamed; OSError where the disk does not take it."""
    write_aside(path, yaml.safe_dump(best.model_dump(mode="json"), sort_keys=False))
