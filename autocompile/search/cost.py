"""How long a slice will take, from the slices seen so far and what compiling was found to cost elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autocompile.knob_table import AUTOTUNE_MODES
from autocompile.records import State, TrialRecord
from autocompile.search.canonical import Key, is_eager, key, micro_batch
from autocompile.space import Config
from autocompile.spec import CONFIRM_SLICE, FULL_DEPTH, SEARCH_SLICE, Facts, Role, StudySpec, accumulation

# Measured on one H200 with a 7B model: 13 s per layer; whole model 32 s at 4 layers and 124 s at 32; attention or
# MLP alone somewhat less than a layer; autotuned kernels 130 s; dynamic=True 77 s.
_MODEL_SHARE_PER_LAYER = 0.25
_PART_OF_A_LAYER = 0.7
_AUTOTUNE = 10.0
_DYNAMIC = 6.0
_LAYER_COMPILE_SECONDS = {"cuda": 20.0, "cpu": 15.0}  # before any compile was seen
_SLICE_SECONDS = {"cuda": 60.0, "cpu": 30.0}  # set-up and measuring, before any slice was seen
_CYCLES_PER_SLICE = 10  # warm-up, the shortest window and the check

_Compiler: TypeAlias = tuple[str, str, str]  # scope, mode, dynamic: what compile time depends on


@dataclass(frozen=True)
class Costs:
    """What the records say about time."""

    spec: StudySpec
    facts: Facts
    measured: tuple[TrialRecord, ...]
    slices: dict[Key, float]
    at_least: dict[Key, float]  # of slices that were ended early
    compiles: dict[_Compiler, float]


def costs(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord]) -> Costs:
    """Confirmations, which start from a warm cache, count only for configs that were never measured otherwise."""
    full = [_timed(record) for record in records if record.fidelity == FULL_DEPTH]
    done = [record for record in full if record.state is State.COMPLETE and record.measurement]
    searched = [record for record in done if record.role is not Role.CONFIRM]
    compiles: dict[_Compiler, float] = {}
    for record in done:
        if record.measurement and not is_eager(record.config):
            name = _compiler(record.config)
            compiles[name] = max(compiles.get(name, 0.0), record.measurement.compile.cold_seconds)
    return Costs(
        spec=spec,
        facts=facts,
        measured=tuple(searched or done),
        slices={**_longest(done), **_longest(searched)},
        at_least=_longest([record for record in full if record.stopped]),
        compiles=compiles,
    )


def compile_weight(config: Config) -> float:
    """How much longer these settings compile one scope than the default ones."""
    mode = _AUTOTUNE if config["mode"] in AUTOTUNE_MODES else 1.0
    return mode * (_DYNAMIC if config["dynamic"] == "true" else 1.0)


def compile_seconds(known: Costs, config: Config) -> float:
    """Seconds of a cold compile: as observed, else scaled from the nearest compile that was."""
    if is_eager(config):
        return 0.0
    wanted = _compiler(config)
    if wanted in known.compiles:
        return known.compiles[wanted]
    weight = _weight(known.facts, wanted)
    if not known.compiles:
        return _LAYER_COMPILE_SECONDS[known.facts.devices[0].type] * weight
    nearest = min(known.compiles, key=lambda other: sum(a != b for a, b in zip(wanted, other, strict=True)))
    return known.compiles[nearest] * weight / _weight(known.facts, nearest)


def slice_seconds(known: Costs, config: Config) -> float:
    """Seconds of a whole slice: as observed, else that of the most similar one with another compile."""
    name = key(config)
    seconds = known.slices.get(name)
    if seconds is None:
        seconds = _uncompiled_seconds(known, config) + compile_seconds(known, config)
    return max(seconds, known.at_least.get(name, 0.0))


def confirm_seconds(known: Costs, config: Config) -> float:
    """Seconds of a confirming slice, as if its cache were cold: its window is longer, its compile shorter."""
    return slice_seconds(known, config) + CONFIRM_SLICE.window_seconds - SEARCH_SLICE.window_seconds


def _timed(record: TrialRecord) -> TrialRecord:
    """With an estimate where nobody watched the slice to its end: its coordinator died before it did."""
    if record.seconds is not None or record.measurement is None:
        return record
    found = record.measurement
    steps = found.step_seconds.median * _CYCLES_PER_SLICE
    return record.model_copy(update={"seconds": (found.setup_seconds or 0.0) + found.compile.seconds + steps})


def _longest(records: list[TrialRecord]) -> dict[Key, float]:
    longest: dict[Key, float] = {}
    for record in records:
        seconds = record.seconds or (record.stopped.bound if record.stopped else None) or 0.0
        longest[key(record.config)] = max(longest.get(key(record.config), 0.0), seconds)
    return longest


def _compiler(config: Config) -> _Compiler:
    return str(config["scope"]), str(config["mode"]), str(config["dynamic"])


def _weight(facts: Facts, compiler: _Compiler) -> float:
    scope, mode, dynamic = compiler
    scopes = {
        "model": 1 + _MODEL_SHARE_PER_LAYER * facts.layers,
        "attention": _PART_OF_A_LAYER,
        "mlp": _PART_OF_A_LAYER,
    }
    return scopes.get(scope, 1.0) * compile_weight({"mode": mode, "dynamic": dynamic})


def _uncompiled_seconds(known: Costs, config: Config) -> float:
    """Set-up and measuring. A window is bounded by time, but its fewest steps grow with the work of a step."""
    nearest = min(known.measured, key=lambda record: _distance(record.config, config), default=None)
    if nearest is None or nearest.measurement is None or nearest.seconds is None:
        return _SLICE_SECONDS[known.facts.devices[0].type]
    growth = _work(known.spec, config) / _work(known.spec, nearest.config) - 1
    more = max(0.0, growth) * nearest.measurement.step_seconds.median * _CYCLES_PER_SLICE
    return max(0.0, nearest.seconds - nearest.measurement.compile.seconds) + more


def _distance(measured: Config, wanted: Config) -> tuple[float, bool, int]:
    """Micro-batch first; then eager, whose seconds hold no compile; then what else changes a step."""
    steps = abs(math.log2(micro_batch(measured) / micro_batch(wanted)))
    others = sum(measured[name] != wanted[name] for name in ("gradient_checkpointing", "sdpa"))
    return steps, not is_eager(measured), others


def _work(spec: StudySpec, config: Config) -> int:
    return micro_batch(config) * accumulation(spec.workload, config)
