"""The live view: what each event makes of it, and what it shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from autocompile.cli.live import Running, View, advance, best_line, render, watching
from autocompile.records import (
    Compile,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Measurement,
    Stage,
    State,
    StepSeconds,
    TrialRecord,
)
from autocompile.space import defaults
from autocompile.spec import Role
from autocompile.tuner import Tick, TrialEnded, TrialStarted

EAGER = defaults()
LAYER = {**EAGER, "scope": "layer", "micro_batch": 8}


def started(slot, number, folder=Path("nowhere")):
    return TrialStarted(slot=slot, number=number, role=Role.SEARCH, config=LAYER, folder=folder)


def measured(number, config, rate):
    found = Measurement(
        tokens_per_second=rate,
        step_seconds=StepSeconds(median=0.1, low=0.1, high=0.1, n=9),
        compile=Compile(seconds=1, cold_seconds=1, cache="cold"),
    )
    outcome = Measured(measurement=found)
    return TrialRecord(
        number=number, role=Role.SEARCH, state=State.COMPLETE, config=config, value=rate, outcome=outcome, seconds=12.0
    )


OOM = TrialRecord(
    number=3,
    role=Role.SEARCH,
    state=State.PRUNED,
    config=LAYER,
    outcome=Failed(failure=Failure(kind=FailureKind.OOM, stage=Stage.WARMUP, message="no memory [left] here")),
)


def text_of(renderable, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("events", "view"),
    [
        pytest.param([Tick(seconds_used=3)], View(total_seconds=60, used_seconds=3), id="time passes"),
        pytest.param(
            [Tick(seconds_used=3), started(0, 7)],
            View(
                total_seconds=60,
                used_seconds=3,
                running={0: Running(trial=started(0, 7), since_seconds=3)},
            ),
            id="a trial starts",
        ),
        pytest.param(
            [started(0, 2), started(1, 3), TrialEnded(record=OOM)],
            View(
                total_seconds=60,
                running={0: Running(trial=started(0, 2), since_seconds=0)},
                ended=(OOM,),
            ),
            id="the trial that ended leaves its slot, no other",
        ),
    ],
)
def test_advance(events, view):
    found = View(total_seconds=60)
    for event in events:
        found = advance(found, event)
    assert found == view


@pytest.mark.parametrize(
    ("records", "text"),
    [
        pytest.param((), "nothing measured yet", id="nothing"),
        pytest.param((OOM,), "nothing measured yet", id="only a failure"),
        pytest.param((measured(0, EAGER, 500),), "best so far: eager, 500 tokens/s, 1.00x eager", id="eager alone"),
        pytest.param(
            (measured(0, EAGER, 500), measured(1, LAYER, 800)),
            "best so far: layer micro_batch=8, 800 tokens/s, 1.60x eager",
            id="against the best eager",
        ),
        pytest.param(
            (measured(1, LAYER, 800),), "best so far: layer micro_batch=8, 800 tokens/s", id="no eager to compare"
        ),
    ],
)
def test_best_line(records, text):
    assert best_line(records) == text


def test_the_view_shows_budget_slot_stage_and_reason():
    view = View(total_seconds=600, used_seconds=90)
    view = advance(view, started(1, 4))
    view = advance(advance(view, TrialEnded(record=OOM)), Tick(seconds_used=107))
    shown = text_of(render(view, {1: "compile"}))
    assert "1 min 47 s of 10 min 0 s" in shown
    assert "slot 1" in shown
    assert "trial 4" in shown
    assert "compile" in shown
    assert "17 s" in shown
    assert "oom in warmup: no memory [left] here" in shown


def test_only_the_last_outcomes_are_shown():
    view = View(total_seconds=None)
    for number in range(20):
        view = advance(view, TrialEnded(record=measured(number, LAYER, 100)))
    shown = text_of(render(view, {}))
    assert "trial 19 " in shown
    assert "trial 12 " in shown
    assert "trial 11 " not in shown


def test_without_a_terminal_each_start_and_end_is_one_plain_line():
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with watching(console, 60) as watch:
        for event in (started(0, 3), Tick(seconds_used=1), TrialEnded(record=OOM)):
            watch(event)
    assert console.file.getvalue().splitlines() == [
        "trial 3 search layer micro_batch=8: started",
        "trial 3 search layer micro_batch=8: oom in warmup: no memory [left] here",
    ]


def test_on_a_terminal_the_stage_comes_from_the_slices_progress_file(tmp_path):
    progress = {"stage": "warmup", "step": 3, "time": 1.0}
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with watching(console, 60) as watch:
        watch(started(0, 3, tmp_path))
    assert "warmup, step 3" in console.file.getvalue()
