"""Whole studies on a simulated clock: they end in time, whatever budget and machine do, and say what they know."""

from __future__ import annotations

import math
import random

import pytest

from autocompile.records import Failed, Failure, FailureKind, Stage, State
from autocompile.search.canonical import in_space, is_eager, key, known_to_fail
from autocompile.search.history import History
from autocompile.search.known_good import plain_compile
from autocompile.search.rounds import MOST_ROUNDS
from autocompile.spec import Role
from tests.unit.search_cases import ALONE, CPU, SMALL_SPACE, config, facts, measured, simulate, spec

K = FailureKind
WINDOW_SECONDS = {Role.CONFIRM: 7, Role.PROBE: 62}


def failure(kind):
    return Failed(failure=Failure(kind=kind, stage=Stage.WARMUP, message="simulated"))


def machine(*, gain=1.6, setup=15.0, compile_seconds=13.0, largest_batch=16, noise=0.0):
    """Training that saturates with the batch; compile gains, costs its seconds, and some settings fail.

    ``noise`` is the standard deviation between processes of one config.
    """
    luck = random.Random(0)

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
        speed *= math.exp(luck.gauss(0, noise))
        seconds = setup + (cold / 3 if role in ALONE else cold) + WINDOW_SECONDS.get(role, 5)
        cache = "warm" if role in ALONE else None
        return measured(0, settings, speed, cold_seconds=cold, cache=cache).outcome, seconds

    return oracle


def assert_legal(study, known, records, *, n_before=0):
    """Only configs of the space and baselines, none searched twice but after a fault, all claims at the end."""
    plain = plain_compile(History(study, known, tuple(records)))
    for record in records:
        baseline = record.role is Role.BASELINE and plain is not None and key(record.config) == key(plain)
        assert in_space(study, known, record.config) or baseline
    conclusive = [key(r.config) for r in records if r.state is not State.FAIL and r.role not in ALONE]
    assert len(set(conclusive)) == len(conclusive)
    assert not [record for record in records if record.state is State.RUNNING]
    stages = [(Role.CONFIRM, Role.PROBE).index(r.role) if r.role in ALONE else -1 for r in records[n_before:]]
    assert stages == sorted(stages)  # search, then confirmations, then the sustained minute
    assert stages.count(1) <= 1


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
def test_a_budget_for_some_blocks_makes_a_confirmed_verdict(seconds, n_slots):
    ended = simulate(spec(seconds=seconds), facts(), machine(), n_slots=n_slots, seed=seconds)
    verdict = ended.finished.verdict
    assert (verdict.confirmed, verdict.result) == (True, "win")
    assert verdict.rounds >= 2
    assert set(verdict.confirmed_by) <= {r.number for r in ended.records if r.role is Role.CONFIRM}


@pytest.mark.parametrize(
    ("seconds", "rounds", "sustained"),
    [
        pytest.param(260, 3, False, id="little time: a few rounds"),
        pytest.param(1800, 5, True, id="half an hour: five, and a sustained minute"),
        pytest.param(3600, 5, True, id="an hour: no more than needed"),
    ],
)
def test_what_the_verdict_of_a_budget_stands_on(seconds, rounds, sustained):
    ended = simulate(spec(seconds=seconds), facts(), machine())
    assert ended.finished.verdict.rounds == rounds
    assert (ended.records[-1].role is Role.PROBE) is sustained
    if sustained:
        assert ended.records[-1].config == ended.finished.verdict.config


@pytest.mark.parametrize(
    ("seconds", "noise", "n_slots"), [(300, 0.003, 1), (300, 0.03, 1), (300, 0.01, 3), (900, 0.01, 1), (900, 0.03, 2)]
)
def test_on_a_noisy_machine_too(seconds, noise, n_slots):
    study = spec(seconds=seconds)
    ended = simulate(study, facts(), machine(noise=noise), n_slots=n_slots, seed=seconds)
    verdict = ended.finished.verdict
    assert (ended.seconds <= seconds, ended.n_cut, verdict.confirmed) == (True, 0, True)
    assert verdict.result == "win" and verdict.rounds <= MOST_ROUNDS
    assert_legal(study, facts(), ended.records)


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
    assert {r.config["micro_batch"] for r in eager} == {8}
    assert ended.finished.verdict.speedup_vs_best_eager == pytest.approx(1.76)


def test_a_small_space_is_searched_to_its_end():
    ended = simulate(spec(space=SMALL_SPACE), facts(CPU, layers=2), machine(setup=2, compile_seconds=5))
    searched = {key(r.config) for r in ended.records if r.role not in ALONE}
    assert len(searched) == 7  # three batches, eager and per layer, and the plain torch.compile
    assert ended.finished.verdict.confirmed


@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("n_trials", [1, 2, 5, 12])
def test_a_number_of_trials_is_kept(n_trials, n_slots):
    ended = simulate(spec(trials=n_trials), facts(), machine(), n_slots=n_slots)
    counted = [r for r in ended.records if r.role not in ALONE]
    assert len(counted) == n_trials
    assert ended.finished.verdict.confirmed is (n_trials > 1)


def test_a_longer_budget_continues_and_keeps_what_was_measured():
    first = simulate(spec(seconds=300), facts(), machine())
    study = spec(seconds=900)
    ended = simulate(study, facts(), machine(), before=first.records, used=first.seconds, seed=1)
    assert ended.records[: len(first.records)] == first.records
    assert first.seconds < ended.seconds <= 900 and len(ended.records) > len(first.records) + 3
    assert ended.finished.verdict.confirmed
    assert History(study, facts(), ended.records).blocks[-1].phase == 1
    assert_legal(study, facts(), ended.records, n_before=len(first.records))


def test_a_longer_budget_with_nothing_left_to_search_adds_rounds():
    study = {"space": SMALL_SPACE, "pinned": {"micro_batch": 4}}
    first = simulate(spec(**study, seconds=260), facts(), machine(compile_seconds=1, noise=0.02))
    ended = simulate(
        spec(**study, seconds=900),
        facts(),
        machine(compile_seconds=1, noise=0.02),
        before=first.records,
        used=first.seconds,
    )
    assert History(spec(**study), facts(), ended.records).blocks[-1].phase == 0
    assert 2 <= first.finished.verdict.rounds < ended.finished.verdict.rounds


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_that_grows_by_little_each_time(seed):
    records, used, pick = (), 0.0, random.Random(seed)
    for _ in range(6):
        study = spec(seconds=used + pick.uniform(20, 200))
        ended = simulate(study, facts(), machine(noise=0.01), before=records, used=used, seed=seed)
        assert ended.seconds <= study.budget.seconds
        assert ended.records[: len(records)] == records
        assert_legal(study, facts(), ended.records, n_before=len(records))
        records, used = ended.records, ended.seconds
    assert ended.finished.verdict.confirmed


@pytest.mark.parametrize("at", [1, 3, 5, 8, 11, 14])
def test_a_lost_slice_is_measured_once_more_and_nothing_else_changes(at):
    study = spec(seconds=540)
    whole = simulate(study, facts(), machine()).records
    lost = whole[at].model_copy(update={"state": State.FAIL, "outcome": None, "value": None, "seconds": 0})
    used = sum(record.seconds for record in whole[:at])
    ended = simulate(study, facts(), machine(), before=[*whole[:at], lost], used=used)
    again = ended.records[at + 1]
    assert (again.config, again.role, again.state) == (lost.config, lost.role, State.COMPLETE)
    assert [r.number for r in ended.records if r.state is State.FAIL] == [at]
    assert ended.seconds <= 540
    assert_legal(study, facts(), ended.records)


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


def broken_when(is_broken, kind=K.OOM):
    """The usual machine, where some slices fail."""
    sound = machine()

    def oracle(settings, role):
        return (failure(kind), 10.0) if is_broken(settings, role) else sound(settings, role)

    return oracle


def test_a_space_without_compile_ends_with_its_best_eager_config():
    ended = simulate(spec(seconds=900, pinned={"scope": "none"}), facts(), machine())
    verdict = ended.finished.verdict
    assert (verdict.result, verdict.confirmed, verdict.config["micro_batch"]) == ("tie", True, 16)
    assert verdict.rounds >= 2


@pytest.mark.parametrize("seconds", [None, 1000])
def test_eager_that_never_fits_leaves_the_best_compiled_config(seconds):
    limits = {"seconds": seconds, "trials": None if seconds else 30}
    oracle = broken_when(lambda settings, role: is_eager(settings))
    ended = simulate(spec(**limits), facts(), oracle)
    verdict = ended.finished.verdict
    assert (verdict.result, verdict.confirmed, verdict.speedup_vs_best_eager) == ("win", True, None)
    assert not is_eager(verdict.config)
    eager = [key(r.config) for r in ended.records if is_eager(r.config)]
    assert len(set(eager)) == len(eager)  # what did not fit is not confirmed


@pytest.mark.parametrize("kind", [K.OOM, K.HANG, K.GPU_FAULT, K.NUMERICS_MISMATCH])
@pytest.mark.parametrize(
    "is_broken",
    [
        pytest.param(lambda settings, role: role is Role.CONFIRM, id="all confirmations"),
        pytest.param(lambda settings, role: role is Role.CONFIRM and is_eager(settings), id="those of eager"),
        pytest.param(lambda settings, role: role is Role.CONFIRM and not is_eager(settings), id="of compiled ones"),
        pytest.param(lambda settings, role: role is Role.PROBE, id="the sustained minute"),
        pytest.param(lambda settings, role: not is_eager(settings), id="everything compiled"),
    ],
)
@pytest.mark.parametrize("limits", [{"seconds": 900}, {"trials": 12}])
def test_a_study_ends_whatever_fails(limits, is_broken, kind):
    ended = simulate(spec(**limits), facts(), broken_when(is_broken, kind))
    assert ended.finished.verdict.config is not None
    assert limits.get("seconds") is None or ended.seconds <= limits["seconds"]
