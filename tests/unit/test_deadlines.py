"""When a slice has taken too long."""

from __future__ import annotations

import pytest

from autocompile.executors.deadlines import Limits, Overdue, Pace, observe, overdue
from autocompile.records import Progress, Stage

BUILD, COMPILE, WARMUP, MEASURE, CHECK = Stage.BUILD, Stage.COMPILE, Stage.WARMUP, Stage.MEASURE, Stage.CHECK
QUICK = [(0, BUILD, 0), (5, COMPILE, 0), (6, WARMUP, 1), (7, WARMUP, 2), (8, MEASURE, 3)]
SLOW_STEPS = [(0, COMPILE, 0), (10, MEASURE, 1), (20, MEASURE, 2), (30, MEASURE, 3)]


def watched(seen: list[tuple[float, Stage, int]]) -> Pace:
    pace = Pace()
    for now, stage, step in seen:
        pace = observe(pace, Progress(stage=stage, step=step, time=0.0), now)
    return pace


@pytest.mark.parametrize(
    ("seen", "now", "late"),
    [
        pytest.param([], 3599, None, id="no progress.json: only the whole slice's time counts"),
        pytest.param([], 3600, (Overdue.SLICE, 3600), id="the whole slice's time"),
        pytest.param([(0, BUILD, 0)], 3599, None, id="a long build"),
        pytest.param([(0, BUILD, 0), (50, COMPILE, 0)], 949, None, id="compile within its time"),
        pytest.param([(0, BUILD, 0), (50, COMPILE, 0)], 950, (Overdue.COMPILE, 900), id="compile over its time"),
        pytest.param(
            [(50, COMPILE, 0), (900, WARMUP, 0)], 950, (Overdue.COMPILE, 900), id="warm-up's first step counts with it"
        ),
        pytest.param(QUICK, 67.9, None, id="a step within the least time"),
        pytest.param(QUICK, 68, (Overdue.STEP, 60), id="a step over the least time"),
        pytest.param(SLOW_STEPS, 229, None, id="a slow step may take 20 median ones"),
        pytest.param(SLOW_STEPS, 230, (Overdue.STEP, 200), id="and no more"),
        pytest.param([(4, MEASURE, 1)], 64, (Overdue.STEP, 60), id="a slice that tells of no compile"),
        pytest.param([*QUICK, (9, CHECK, 3), (10, COMPILE, 6)], 909, None, id="the check may compile a copy"),
        pytest.param(
            [*QUICK, (9, CHECK, 3), (10, COMPILE, 6)], 910, (Overdue.STEP, 900), id="but no longer than the model"
        ),
        pytest.param([*QUICK, (9, CHECK, 3)], 69, (Overdue.STEP, 60), id="the check hangs"),
        pytest.param(
            [(0, COMPILE, 0), (100, WARMUP, 1), (100.2, WARMUP, 2)], 399, None, id="warm-up may compile once more"
        ),
        pytest.param(
            [(0, COMPILE, 0), (100, WARMUP, 1), (101, MEASURE, 2)], 161, (Overdue.STEP, 60), id="the window may not"
        ),
        pytest.param([(0, WARMUP, 0), (2, WARMUP, 1), (3, WARMUP, 101)], 63, (Overdue.STEP, 60), id="steps in bulk"),
    ],
)
def test_overdue(seen: list[tuple[float, Stage, int]], now: float, late: tuple[Overdue, float] | None) -> None:
    assert overdue(watched(seen), Limits(), deadline_seconds=3600, now=now) == late


@pytest.mark.parametrize(
    ("now", "late"),
    [
        pytest.param(24.9, None, id="two thirds of what is left are for the first step"),
        pytest.param(25, (Overdue.COMPILE, 20), id="the rest is for measuring, so it may not take more"),
    ],
)
def test_a_short_slice_leaves_time_to_measure(now: float, late: tuple[Overdue, float] | None) -> None:
    assert overdue(watched([(0, BUILD, 0), (5, COMPILE, 0)]), Limits(), deadline_seconds=35, now=now) == late


def test_the_same_progress_read_again_changes_nothing() -> None:
    assert watched(QUICK) == watched([*QUICK, (30, MEASURE, 3)])
