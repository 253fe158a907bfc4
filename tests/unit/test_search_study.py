"""Whole studies on a simulated clock: they end in time, whatever budget and machine do, and say what they know."""

from __future__ import annotations

import pytest

from autocompile.records import Failed, Failure, FailureKind, Stage, State
from autocompile.search.canonical import in_space, is_eager, key, known_to_fail
from autocompile.search.history import History
from autocompile.search.known_good import plain_compile
from autocompile.spec import Role
from tests.unit.search_cases import CPU, SMALL_SPACE, config, facts, measured, simulate, spec

K = FailureKind


def failure(kind):
    return Failed(failure=Failure(kind=kind, stage=Stage.WARMUP, message="simulated"))


def machine(*, gain=1.6, setup=15.0, compile_seconds=13.0, largest_batch=16):
    """Training that saturates with the batch; compile gains, costs its seconds, and some settings fail."""

    def oracle(settings, role):
        size = int(settings["micro_batch"])
        if size > largest_batch:
            return failure(K.OOM), setup
        if known_to_fail(settings):
            return failure(K.COMPILE_ERROR), setup
        if settings["fullgraph"] and settings["scope"] == "model":
            return failure(K.GRAPH_BREAK), setup
        speed = 8000 * size / (size + 4) * (0.8 if settings["gradient_checkpointing"] else 1)
        cold = 0.0
        if not is_eager(settings):
            speed *= gain * (1.1 if settings["mode"] == "reduce-overhead" else 1)
            cold = compile_seconds * (9 if settings["scope"] == "model" else 1)
            cold *= 10 if settings["mode"] == "max-autotune" else 1
        confirms = role is Role.CONFIRM
        seconds = setup + (cold / 3 if confirms else cold) + (10 if confirms else 5)
        return measured(0, settings, speed, cold_seconds=cold).outcome, seconds

    return oracle


def assert_legal(study, known, records):
    """Only configs of the space and baselines, none twice but after a fault, nothing beside a confirmation."""
    plain = plain_compile(History(study, known, tuple(records)))
    for record in records:
        baseline = record.role is Role.BASELINE and plain is not None and key(record.config) == key(plain)
        assert in_space(study, known, record.config) or baseline
    conclusive = [(r.role is Role.CONFIRM, key(r.config)) for r in records if r.state is not State.FAIL]
    assert len(set(conclusive)) == len(conclusive)
    assert not [record for record in records if record.state is State.RUNNING]


BUDGETS = [20, 45, 60, 90, 120, 150, 200, 260, 420, 540]


@pytest.mark.parametrize("seconds", BUDGETS)
@pytest.mark.parametrize("setup", [3.0, 15.0, 40.0])
def test_a_study_ends_within_its_budget_and_starts_nothing_that_cannot_end(seconds, setup):
    study = spec(seconds=seconds)
    ended = simulate(study, facts(), machine(setup=setup), seed=seconds)
    baseline_seconds = setup + 5
    assert ended.seconds <= seconds
    assert ended.n_cut == (1 if baseline_seconds > seconds else 0)
    assert_legal(study, facts(), ended.records)


@pytest.mark.parametrize("n_slots", [2, 5])
@pytest.mark.parametrize("seconds", [45, 90, 150, 333])
def test_so_it_does_in_several_slots(seconds, n_slots):
    study = spec(seconds=seconds)
    ended = simulate(study, facts(), machine(), n_slots=n_slots, seed=seconds)
    assert (ended.seconds <= seconds, ended.n_cut) == (True, 0)
    assert_legal(study, facts(), ended.records)


@pytest.mark.parametrize(
    ("seconds", "n_slots"), [(260, 1), (333, 1), (420, 1), (900, 1), (260, 2), (420, 2), (260, 5), (420, 5)]
)
def test_a_budget_for_the_round_makes_a_confirmed_verdict(seconds, n_slots):
    ended = simulate(spec(seconds=seconds), facts(), machine(), n_slots=n_slots, seed=seconds)
    verdict = ended.finished.verdict
    assert (verdict.confirmed, verdict.result) == (True, "win")
    assert {r.number for r in ended.records if r.role is Role.CONFIRM} == set(verdict.confirmed_by)


@pytest.mark.parametrize(
    ("gain", "result"),
    [
        pytest.param(1.6, "win", id="compile is faster"),
        pytest.param(0.91, "tie", id="compile is as fast"),  # the simulated CUDA graphs add a tenth
        pytest.param(0.6, "loss", id="compile is slower"),
    ],
)
def test_the_verdict_is_what_the_machine_does(gain, result):
    ended = simulate(spec(seconds=400), facts(), machine(gain=gain))
    assert (ended.finished.verdict.confirmed, ended.finished.verdict.result) == (True, result)


def test_eager_is_compared_at_its_own_best_batch():
    ended = simulate(spec(seconds=900), facts(), machine(largest_batch=8))
    eager = [r for r in ended.records if r.role is Role.CONFIRM and is_eager(r.config)]
    assert [r.config["micro_batch"] for r in eager] == [8]
    assert ended.finished.verdict.speedup_vs_best_eager == pytest.approx(1.76)


def test_a_small_space_is_searched_to_its_end():
    ended = simulate(spec(space=SMALL_SPACE), facts(CPU, layers=2), machine(setup=2, compile_seconds=5))
    searched = {key(r.config) for r in ended.records if r.role is not Role.CONFIRM}
    assert len(searched) == 7  # three batches, eager and per layer, and the plain torch.compile
    assert ended.finished.verdict.confirmed


@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("n_trials", [1, 2, 5, 12])
def test_a_number_of_trials_is_kept(n_trials, n_slots):
    ended = simulate(spec(trials=n_trials), facts(), machine(), n_slots=n_slots)
    counted = [r for r in ended.records if r.role is not Role.CONFIRM]
    assert len(counted) == n_trials


def test_a_longer_budget_continues_and_keeps_what_was_measured():
    first = simulate(spec(seconds=300), facts(), machine())
    study = spec(seconds=900)
    ended = simulate(study, facts(), machine(), before=first.records, used=first.seconds, seed=1)
    assert ended.records[: len(first.records)] == first.records
    assert first.seconds < ended.seconds <= 900 and len(ended.records) > len(first.records) + 3
    assert ended.finished.verdict.confirmed
    assert_legal(study, facts(), ended.records)


@pytest.mark.parametrize("at", [1, 3, 5, 8, 11])
def test_a_lost_slice_is_measured_once_more_and_nothing_else_changes(at):
    study = spec(seconds=540)
    whole = simulate(study, facts(), machine())
    at = min(at, len(whole.records) - 1)
    lost = whole.records[at].model_copy(update={"state": State.FAIL, "outcome": None, "value": None})
    ended = simulate(study, facts(), machine(), before=[*whole.records[:at], lost], used=at * 30.0)
    again = [r for r in ended.records if key(r.config) == key(lost.config) and r.role is lost.role]
    assert [r.state for r in again][:2] == [State.FAIL, again[-1].state] and len(again) == 2
    assert ended.seconds <= 540


def test_broken_slices_are_repeated_once_and_the_study_goes_on():
    sound = machine()
    broken = config(scope="layer", mode="reduce-overhead")

    def oracle(settings, role):
        return (failure(K.GPU_FAULT), 10.0) if key(settings) == key(broken) else sound(settings, role)

    ended = simulate(spec(seconds=540), facts(), oracle)
    assert [r.state for r in ended.records if key(r.config) == key(broken)] == [State.FAIL, State.FAIL]
    assert ended.finished.verdict.confirmed


def test_a_slow_compile_does_not_break_the_budget():
    ended = simulate(spec(seconds=240), facts(), machine(compile_seconds=150))
    assert ended.seconds <= 240
    assert ended.finished.verdict.config is not None
