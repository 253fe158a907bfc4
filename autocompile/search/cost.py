"""How long a slice will take, from the slices seen so far and what compiling was found to cost elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

from autocompile.knob_table import AUTOTUNE_MODES
from autocompile.records import State, TrialRecord
from autocompile.search.canonical import Key, candidates, is_eager, key, micro_batch
from autocompile.search.per_record import PerRecord
from autocompile.space import Config
from autocompile.spec import FULL_DEPTH, Facts, Role, StudySpec
from autocompile.values import remembered

# Measured on one H200 with a 7B model: 13 s per layer; whole model 32 s at 4 layers and 124 s at 32; attention or
# MLP alone somewhat less than a layer; autotuned kernels 130 s; dynamic=True 77 s.
_MODEL_SHARE_PER_LAYER = 0.25
_PART_OF_A_LAYER = 0.7
_AUTOTUNE = 10.0
_DYNAMIC = 6.0
# Guesses, until one of the kind was seen
_NESTED_SHARE_PER_LAYER = 0.1  # of the trace alone
_WITHOUT_INDUCTOR = 0.3
_TUNED = 3.0  # by coordinate descent
_LAYER_COMPILE_SECONDS = {"cuda": 20.0, "cpu": 15.0}  # before any compile was seen
_SLICE_SECONDS = {"cuda": 60.0, "cpu": 30.0}  # set-up and measuring, before any slice was seen
_WARM_SHARE = 1 / 3  # of a cold compile; 2 of 14 s were seen on the H200, more where torch bypasses a cache
# Of a confirmation, whose window is longer and whose interpreter is its own: 4 to 13 s were seen on an H200's host
_CONFIRM_LONGER_SECONDS = {"cuda": 8.0, "cpu": 5.0}
_CYCLES_PER_SLICE = 10  # warm-up, the shortest window and the check

_Compiler: TypeAlias = tuple[str, str, str, str, bool]  # scope, backend, mode, dynamic, tuned: of a compile
_Step: TypeAlias = tuple[int, bool, str, str, str]  # micro-batch, checkpointing, sdpa, padding, way: of a step


@dataclass(frozen=True)
class Costs:
    """What the records say about time."""

    measured: bool
    slices: dict[Key, float]
    checked: dict[Key, float]  # part of these, for the comparison with fp32 eager
    confirmed: dict[Key, float]  # another confirmation
    confirmed_longer: float  # than a search slice
    at_least: dict[Key, float]  # of slices that were ended early
    cold: Callable[[_Compiler], float]
    uncompiled: Callable[[_Step], float]


def costs(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord]) -> Costs:
    """Confirmations, which start from a warm cache, count only for configs that were never measured otherwise."""
    full = [one for one in _slices(spec, facts).of(records) if one.full_depth]
    searched = [one for one in full if one.measured and one.role in (Role.BASELINE, Role.SEARCH)]
    confirmed = [one for one in full if one.measured and one.role is Role.CONFIRM]
    measured = searched or confirmed
    alike: dict[tuple[_Step, bool], TrialRecord] = {}
    for one in measured:
        alike.setdefault((one.step, one.compiler is None), one.record)
    return Costs(
        measured=bool(measured),
        slices={**_longest(confirmed), **_longest(searched)},
        checked={one.key: one.checked_seconds for one in searched if one.checked_seconds},
        confirmed=_longest(list(map(_again, _without_first(confirmed)))),
        confirmed_longer=_CONFIRM_LONGER_SECONDS[facts.devices[0].type],
        at_least=_longest([one for one in full if one.stopped]),
        cold=cache(partial(_cold_seconds, facts, _observed_compiles(measured))),
        uncompiled=cache(partial(_uncompiled_seconds, spec, facts, list(alike.values()))),
    )


@remembered(4)
def by_compiler(spec: StudySpec, facts: Facts) -> list[list[Config]]:
    """The candidates in groups that take equally long to compile."""
    groups: dict[_Compiler | None, list[Config]] = {}
    for config in candidates(spec, facts):
        groups.setdefault(None if is_eager(config) else _compiler(config), []).append(config)
    return list(groups.values())


def compile_weight(config: Config) -> float:
    """How much longer these settings compile one scope than the default ones."""
    mode = _AUTOTUNE if config["mode"] in AUTOTUNE_MODES else _TUNED if config["coordinate_descent_tuning"] else 1.0
    backend = 1.0 if config["backend"] == "inductor" else _WITHOUT_INDUCTOR
    return mode * backend * (_DYNAMIC if config["dynamic"] == "true" else 1.0)


def compile_seconds(known: Costs, config: Config) -> float:
    """Seconds of a cold compile."""
    return 0.0 if is_eager(config) else known.cold(_compiler(config))


def slice_seconds(known: Costs, config: Config) -> float:
    """Seconds of a whole slice: as observed, else those of the most similar one with this config's compile."""
    name = key(config)
    seconds = known.slices.get(name)
    if seconds is None:
        seconds = known.uncompiled(_step(config)) + compile_seconds(known, config)
    return max(seconds, known.at_least.get(name, 0.0))


def confirm_seconds(known: Costs, config: Config) -> float:
    """Seconds of a confirming slice, as observed where one ended."""
    observed = known.confirmed.get(key(config))
    return first_confirm_seconds(known, config) if observed is None else observed


def first_confirm_seconds(known: Costs, config: Config) -> float:
    """As predicted from other slices: it starts an interpreter, finds the cache that the search slice left, and
    compares nothing again."""
    saved = (1 - _WARM_SHARE) * compile_seconds(known, config) + known.checked.get(key(config), 0.0)
    return slice_seconds(known, config) - saved + known.confirmed_longer


def _timed(record: TrialRecord) -> TrialRecord:
    """With an estimate where nobody watched the slice to its end: its coordinator died before it did."""
    if record.seconds is not None or record.measurement is None:
        return record
    found = record.measurement
    steps = found.step_seconds.median * _CYCLES_PER_SLICE
    return record.model_copy(update={"seconds": (found.setup_seconds or 0.0) + found.compile.seconds + steps})


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """What one record says about time."""

    record: TrialRecord
    role: Role
    key: Key
    step: _Step
    compiler: _Compiler | None  # where something is compiled
    full_depth: bool
    measured: bool
    stopped: bool
    seconds: float
    cold_seconds: float
    checked_seconds: float


@remembered(4)
def _slices(spec: StudySpec, facts: Facts) -> PerRecord[_Slice]:
    return PerRecord(_slice)


def _slice(record: TrialRecord) -> _Slice:
    record = _timed(record)
    return _Slice(
        record=record,
        role=record.role,
        key=key(record.config),
        step=_step(record.config),
        compiler=None if is_eager(record.config) else _compiler(record.config),
        full_depth=record.fidelity == FULL_DEPTH,
        measured=record.state is State.COMPLETE and record.measurement is not None,
        stopped=record.stopped is not None,
        seconds=record.seconds or (record.stopped.bound if record.stopped else None) or 0.0,
        cold_seconds=record.measurement.compile.cold_seconds if record.measurement else 0.0,
        checked_seconds=_checked_seconds(record),
    )


def _without_first(slices: Sequence[_Slice]) -> list[_Slice]:
    """Of each config, where it has more: the first fills caches, the disk's among them, for the others."""
    turns: dict[Key, list[_Slice]] = {}
    for one in slices:
        turns.setdefault(one.key, []).append(one)
    return [one for own in turns.values() for one in own[1:] or own]


def _again(one: _Slice) -> _Slice:
    """The same slice once more: without the comparison, and from the cache that it leaves."""
    found = one.record.measurement
    compiled = found.compile.seconds if found and found.compile.cache == "cold" else 0.0
    return replace(one, seconds=one.seconds - one.checked_seconds - (1 - _WARM_SHARE) * compiled)


def _checked_seconds(record: TrialRecord) -> float:
    found = record.outcome.telemetry.numerics if record.outcome else None
    return (found.seconds if found else None) or 0.0


def _longest(slices: Sequence[_Slice]) -> dict[Key, float]:
    longest: dict[Key, float] = {}
    for one in slices:
        if one.seconds >= longest.get(one.key, 0.0):
            longest[one.key] = one.seconds
    return longest


def _compiler(config: Config) -> _Compiler:
    words = (str(config[name]) for name in ("scope", "backend", "mode", "dynamic"))
    return (*words, bool(config["coordinate_descent_tuning"]))  # type: ignore[return-value]


def _step(config: Config) -> _Step:
    words = (str(config[name]) for name in ("sdpa", "padding", "parallel"))
    return (micro_batch(config), bool(config["gradient_checkpointing"]), *words)  # type: ignore[return-value]


def _observed_compiles(slices: Sequence[_Slice]) -> dict[_Compiler, float]:
    longest: dict[_Compiler, float] = {}
    for one in slices:
        if one.compiler is not None and one.cold_seconds > longest.get(one.compiler, -1.0):
            longest[one.compiler] = one.cold_seconds
    return longest


def _cold_seconds(facts: Facts, observed: dict[_Compiler, float], wanted: _Compiler) -> float:
    """As observed, else scaled from the nearest compile that was."""
    if wanted in observed:
        return observed[wanted]
    if not observed:
        return _LAYER_COMPILE_SECONDS[facts.devices[0].type] * _weight(facts, wanted)
    nearest = min(observed, key=lambda other: sum(a != b for a, b in zip(wanted, other, strict=True)))
    return observed[nearest] * _weight(facts, wanted) / _weight(facts, nearest)


def _weight(facts: Facts, compiler: _Compiler) -> float:
    scope, backend, mode, dynamic, tuned = compiler
    scopes = {
        "model": 1 + _MODEL_SHARE_PER_LAYER * facts.layers,
        "nested": 1 + _NESTED_SHARE_PER_LAYER * facts.layers,
        "attention": _PART_OF_A_LAYER,
        "mlp": _PART_OF_A_LAYER,
    }
    return scopes.get(scope, 1.0) * compile_weight(
        {"backend": backend, "mode": mode, "dynamic": dynamic, "coordinate_descent_tuning": tuned}
    )


def _uncompiled_seconds(spec: StudySpec, facts: Facts, measured: Sequence[TrialRecord], wanted: _Step) -> float:
    """Set-up and measuring. A window is bounded by time, but its fewest steps grow with the work of a step."""
    nearest = min(measured, key=lambda record: _distance(record.config, wanted), default=None)
    if nearest is None or nearest.measurement is None or nearest.seconds is None:
        return _SLICE_SECONDS[facts.devices[0].type]
    growth = 1.0 if spec.workload.global_batch else wanted[0] / micro_batch(nearest.config)
    more = max(0.0, growth - 1) * nearest.measurement.step_seconds.median * _CYCLES_PER_SLICE
    return max(0.0, nearest.seconds - nearest.measurement.compile.seconds) + more


def _distance(measured: Config, wanted: _Step) -> tuple[float, bool, int]:
    """Micro-batch first; then eager, whose seconds hold no compile; then what else changes a step."""
    size, *others = _step(measured)
    steps = abs(math.log2(size / wanted[0]))
    return steps, not is_eager(measured), sum(a != b for a, b in zip(others, wanted[1:], strict=True))
