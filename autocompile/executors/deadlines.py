"""When a slice has taken too long: decided from what its progress.json showed so far, without a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from autocompile.records import Progress, Stage

_STEPS_KEPT = 64


class Overdue(StrEnum):
    """Which time ran out."""

    COMPILE = "compile"  # no first step
    STEP = "step"  # the next step did not come
    SLICE = "slice"  # the whole slice's time, which is what the budget left it


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``compile_share`` is how much of the time that is left when compiling begins the first step may take.

    ``exit_seconds`` is what a child may take to exit once its answer lies there complete.
    """

    compile_seconds: float = 900.0
    compile_share: float = 2 / 3
    step_seconds: float = 60.0
    step_factor: float = 20.0  # a step may take so many times the median one
    recompile_factor: float = 3.0  # in warm-up also so many times what the first step took: it may compile again
    exit_seconds: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was seen of a slice; times are seconds since its start.

    ``compile_began`` is when its compile or warm-up was first seen, ``changed`` when its stage or step last changed.
    """

    stage: Stage | None = None
    step: int = 0
    changed: float = 0.0
    compile_began: float | None = None
    first_step_seconds: float | None = None
    step_seconds: tuple[float, ...] = ()


def observe(pace: Pace, progress: Progress, now: float) -> Pace:
    """The pace after this progress was read; a step count that goes back (a new window) starts the count again."""
    if progress.stage is pace.stage and progress.step == pace.step:
        return pace
    seen = replace(pace, stage=progress.stage, step=progress.step, changed=now)
    if pace.compile_began is None and progress.stage in (Stage.COMPILE, Stage.WARMUP):
        seen = replace(seen, compile_began=now)
    if not _is_counted(seen):
        return seen
    if pace.first_step_seconds is None:
        began = now if seen.compile_began is None else seen.compile_began
        return replace(seen, first_step_seconds=now - began)
    new_steps = progress.step - pace.step
    if new_steps <= 0:
        return seen
    taken = (now - pace.changed) / new_steps
    return replace(seen, step_seconds=(*pace.step_seconds, taken)[-_STEPS_KEPT:])


def overdue(pace: Pace, limits: Limits, *, deadline_seconds: float, now: float) -> tuple[Overdue, float] | None:
    """The time that ran out and how long it was, or None while the slice may go on."""
    if now >= deadline_seconds:
        return Overdue.SLICE, deadline_seconds
    if pace.first_step_seconds is not None:
        bound = _step_bound(pace, limits)
        return (Overdue.STEP, bound) if now - pace.changed >= bound else None
    if pace.compile_began is None:
        return None
    bound = min(limits.compile_seconds, limits.compile_share * (deadline_seconds - pace.compile_began))
    return (Overdue.COMPILE, bound) if now - pace.compile_began >= bound else None


def _is_counted(pace: Pace) -> bool:
    """Steps are being made: the first one is behind us."""
    return pace.stage in (Stage.MEASURE, Stage.CHECK) or (pace.stage is Stage.WARMUP and pace.step >= 1)


def _step_bound(pace: Pace, limits: Limits) -> float:
    if pace.stage is Stage.COMPILE:  # once more, of the copy whose gradients are checked
        return limits.compile_seconds
    usual = limits.step_factor * median(pace.step_seconds) if pace.step_seconds else 0.0
    again = limits.recompile_factor * (pace.first_step_seconds or 0.0) if pace.stage is Stage.WARMUP else 0.0
    return max(limits.step_seconds, usual, again)
