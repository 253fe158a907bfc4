"""The objective, the verdict and the best-config file."""

from __future__ import annotations

import pytest

from autocompile.records import FailureKind, Result, StepSeconds
from autocompile.search import best_config, objective, tight_memory, verdict
from autocompile.spec import Paired, Role
from tests.unit.search_cases import (
    EAGER,
    GRAPHS,
    LAYER,
    MODEL,
    SMALL_SPACE,
    config,
    confirmations,
    confirmed,
    facts,
    failed,
    measured,
    noisy,
    running,
    spec,
    stopped,
)

EAGER_8, LAYER_8, LAYER_2 = (
    config(micro_batch=8),
    config(scope="layer", micro_batch=8),
    config(scope="layer", micro_batch=2),
)


SEARCHED = [
    measured(0, EAGER, 8000, role=Role.BASELINE),
    measured(1, LAYER, 12000),
    measured(2, GRAPHS, 11900),
    measured(3, MODEL, 10000, role=Role.BASELINE),
]
BLOCKS = confirmations(4, (LAYER, [12400.0] * 3), (EAGER, [8000.0] * 3), (GRAPHS, [12200.0] * 3))
NEW_PHASE = confirmations(21, (LAYER_8, [19000.0] * 2), (EAGER, [8000.0] * 2))


@pytest.mark.parametrize(
    ("planned", "value"),
    [
        pytest.param({}, 10_000, id="steady"),
        pytest.param({"planned_tokens": 1_000_000}, 1_000_000 / 113, id="a planned run pays for its compile"),
        pytest.param({"planned_tokens": 10**12}, pytest.approx(10_000, rel=1e-4), id="a very long run does not notice"),
        pytest.param(
            {"planned_steps": 500, "workload": {"global_batch": 4}},
            500 * 2048 / (13 + 500 * 0.2048),
            id="a run in steps of as many tokens as the slice's steps held",
        ),
    ],
)
def test_objective(planned, value):
    record = measured(0, LAYER, 10_000, cold_seconds=13)  # 4 sequences of 512 tokens a step
    assert objective(spec(**planned), record.measurement) == pytest.approx(value)


@pytest.mark.parametrize(
    ("planned", "value"),
    [
        pytest.param({}, 1000, id="steady"),
        pytest.param({"planned_tokens": 100_000}, 100_000 / 113, id="a run in tokens"),
        pytest.param(
            {"planned_steps": 50, "workload": {"global_batch": 4}},
            102_400 / (13 + 102.4),
            id="a run in steps, which hold the same tokens at every depth",
        ),
    ],
)
def test_the_objective_of_a_slice_at_less_than_full_depth(planned, value):
    shallow = measured(0, LAYER, 10_000, cold_seconds=13).measurement
    assert objective(spec(**planned), shallow, full_depth=1000) == pytest.approx(value)


def test_steps_of_samples_are_counted_in_samples():
    # 8 samples in 2 s; with 1024 tokens to a sample the run would be so long that its compile would not count
    step = StepSeconds(median=2, low=2, high=2, n=5)
    record = measured(0, LAYER, 4, cold_seconds=200, unit="samples")
    measurement = record.measurement.model_copy(update={"step_seconds": step})
    study = spec(planned_steps=100, workload={"global_batch": 8, "sequence_length": 1024})
    assert objective(study, measurement) == pytest.approx(800 / (200 + 200))


@pytest.mark.parametrize(
    ("records", "result", "best", "is_confirmed"),
    [
        pytest.param([], Result.NONE, None, False, id="nothing measured"),
        pytest.param([failed(0, EAGER, FailureKind.HANG)], Result.NONE, None, False, id="nothing but failures"),
        pytest.param(SEARCHED[:1], Result.TIE, EAGER, False, id="only eager"),
        pytest.param(SEARCHED, Result.WIN, LAYER, False, id="no confirmation"),
        pytest.param([*SEARCHED, *BLOCKS[:3]], Result.WIN, LAYER, False, id="one block has no spread"),
        pytest.param([*SEARCHED, *BLOCKS[:4]], Result.WIN, LAYER, False, id="nor has one and a half"),
        pytest.param([*SEARCHED, *BLOCKS[:5]], Result.WIN, LAYER, True, id="two of the pair that matters"),
        pytest.param([*SEARCHED, *BLOCKS], Result.WIN, LAYER, True, id="three blocks"),
        pytest.param(
            [*SEARCHED, *BLOCKS, measured(20, LAYER_8, 20000)], Result.WIN, LAYER, True, id="later search undoes none"
        ),
        pytest.param(
            [*SEARCHED, *BLOCKS, measured(20, LAYER_8, 20000), *NEW_PHASE[:2]],
            Result.WIN,
            LAYER,
            True,
            id="a single block of a new best is not enough",
        ),
        pytest.param(
            [*SEARCHED, *BLOCKS, measured(20, LAYER_8, 20000), *NEW_PHASE],
            Result.WIN,
            LAYER_8,
            True,
            id="a new best is confirmed in a phase of its own",
        ),
        pytest.param(
            [*SEARCHED, *confirmations(4, (LAYER, [9000.0] * 2), (EAGER, [8000.0] * 2), (GRAPHS, [11900.0] * 2))],
            Result.WIN,
            GRAPHS,
            True,
            id="only confirmations choose the winner",
        ),
        pytest.param(
            [*SEARCHED[:2], measured(2, GRAPHS, 12300), SEARCHED[3]],
            Result.WIN,
            LAYER,
            False,
            id="provisional: within 3 % the simpler one",
        ),
        pytest.param(
            [*SEARCHED[:2], measured(2, GRAPHS, 12400), SEARCHED[3]],
            Result.WIN,
            GRAPHS,
            False,
            id="provisional: beyond 3 % the faster one",
        ),
        pytest.param(
            [SEARCHED[0], measured(1, LAYER, 8950)],
            Result.TIE,
            EAGER,
            False,
            id="provisional: faster by less than 10 % and its own spread",
        ),
        pytest.param(
            [SEARCHED[0], measured(1, LAYER, 9000)], Result.WIN, LAYER, False, id="provisional: faster by more"
        ),
        pytest.param(
            [SEARCHED[0], measured(1, LAYER, 7100)], Result.LOSS, EAGER, False, id="provisional: slower by more"
        ),
        pytest.param(
            [*SEARCHED, *BLOCKS, failed(13, LAYER, FailureKind.NUMERICS_MISMATCH, role=Role.CONFIRM)],
            Result.WIN,
            GRAPHS,
            True,
            id="a finalist that fails is out",
        ),
        pytest.param(
            [*SEARCHED, *BLOCKS, confirmed(13, LAYER, 12400, reserved_gib=135)],
            Result.WIN,
            GRAPHS,
            True,
            id="so is one that leaves too little memory",
        ),
        pytest.param(
            [*SEARCHED, *BLOCKS, stopped(13, LAYER, "budget", role=Role.CONFIRM)],
            Result.WIN,
            LAYER,
            True,
            id="the budget ended a block",
        ),
        pytest.param(
            [*SEARCHED, *BLOCKS, running(13, LAYER, role=Role.CONFIRM)], Result.WIN, LAYER, True, id="a block runs"
        ),
        pytest.param(
            [*SEARCHED, *BLOCKS[:3], failed(7, GRAPHS, FailureKind.OOM, role=Role.CONFIRM)],
            Result.WIN,
            LAYER,
            False,
            id="one block and a failure",
        ),
        pytest.param(
            [*SEARCHED, measured(4, LAYER_8, 20000, applied="none")], Result.WIN, LAYER, False, id="nothing compiled"
        ),
        pytest.param(
            [*SEARCHED, measured(4, LAYER_8, 20000, degraded=("partial_eager",))],
            Result.WIN,
            LAYER,
            False,
            id="partly eager",
        ),
        pytest.param(
            [*SEARCHED, measured(4, LAYER_8, 20000, reserved_gib=130)], Result.WIN, LAYER, False, id="tight memory"
        ),
        pytest.param(
            [failed(0, EAGER, FailureKind.OOM, role=Role.BASELINE), measured(1, LAYER, 9000)],
            Result.WIN,
            LAYER,
            False,
            id="eager does not even fit",
        ),
        pytest.param(
            [measured(0, EAGER, 9000, reserved_gib=139), failed(1, LAYER, FailureKind.OOM)],
            Result.TIE,
            EAGER,
            False,
            id="eager with little memory left is all there is",
        ),
        pytest.param([measured(0, LAYER, 9000)], Result.TIE, LAYER, False, id="eager was not tried"),
    ],
)
def test_verdict(records, result, best, is_confirmed):
    found = verdict(spec(), facts(), records)
    assert (found.result, found.config, found.confirmed) == (result, best, is_confirmed)
    assert bool(found.confirmed_by) is bool(found.rounds) is is_confirmed


def test_a_config_that_failed_in_the_end_proves_nothing():
    blocks = confirmations(4, (LAYER, [20000.0] * 3), (EAGER, [8000.0] * 3), (GRAPHS, [12200.0] * 3))
    broken = failed(13, LAYER, FailureKind.NUMERICS_MISMATCH, role=Role.CONFIRM)
    found = verdict(spec(), facts(), [*SEARCHED, *blocks, broken])
    assert found.confirmed_by == (5, 6, 8, 9, 11, 12)
    assert LAYER not in [run.config for run in found.by_length]


def test_the_ratios_are_those_of_the_confirmations():
    found = verdict(spec(), facts(), [*SEARCHED, *BLOCKS])
    assert found.tokens_per_second == pytest.approx(12400)
    assert found.speedup == found.speedup_vs_best_eager == pytest.approx(1.55)
    assert (found.speedup_low, found.speedup_high) == (pytest.approx(1.55), pytest.approx(1.55))  # no noise at all
    assert found.speedup_vs_plain_compile == pytest.approx(1.2)  # of the search slices
    assert (found.confirmed_by, found.rounds) == (tuple(range(4, 13)), 3)


def test_the_interval_of_single_measurements_is_their_own_and_a_fixed_allowance():
    found = verdict(spec(), facts(), SEARCHED)
    own = 1.01 / 0.99  # both windows at the ends of their intervals
    assert found.speedup_vs_best_eager == pytest.approx(1.5)
    assert found.speedup_low == pytest.approx(1.5 / 1.10 / own)
    assert found.speedup_high == pytest.approx(1.5 * 1.10 * own)


def test_a_noisy_machine_gives_no_provisional_win():
    noisy = StepSeconds(median=0.17, low=0.11, high=0.3, n=9)
    records = [measured(0, EAGER, 8000, role=Role.BASELINE), measured(1, LAYER, 12000)]
    outcome = records[1].outcome
    measurement = outcome.measurement.model_copy(update={"step_seconds": noisy})
    records[1] = records[1].model_copy(update={"outcome": outcome.model_copy(update={"measurement": measurement})})
    assert verdict(spec(), facts(), records).result is Result.TIE


def test_a_config_whose_sustained_minute_fails_does_not_win():
    records = [*SEARCHED, *confirmations(4, (LAYER, [12000] * 4), (EAGER, [8000.0] * 4), (GRAPHS, [11000] * 4))]
    assert verdict(spec(), facts(), records).config == LAYER
    broken = failed(99, LAYER, FailureKind.NUMERICS_MISMATCH, role=Role.PROBE)
    assert verdict(spec(), facts(), [*records, broken]).config == GRAPHS


def test_eager_that_the_machine_did_not_let_confirm_is_no_win_for_compile():
    lost = [failed(20 + n, EAGER, FailureKind.GPU_FAULT, role=Role.CONFIRM) for n in range(2)]
    slower = [measured(0, EAGER, 8000, role=Role.BASELINE), measured(1, LAYER, 7000), measured(2, GRAPHS, 7000)]
    records = [*slower, *confirmations(4, (LAYER, [7000] * 4), (GRAPHS, [7000] * 4)), *lost]
    assert verdict(spec(), facts(), records).result is not Result.WIN


def test_the_speed_is_the_geometric_mean_of_the_blocks_that_count():
    records = [*SEARCHED, *confirmations(4, (LAYER, [9000, 12100, 12000, 12400]), (EAGER, [8000.0] * 4))]
    found = verdict(spec(), facts(), records)
    assert found.tokens_per_second == pytest.approx((12100 * 12000 * 12400) ** (1 / 3))


def test_a_sustained_minute_corrects_the_speed_and_what_follows_from_it():
    before = verdict(spec(), facts(), [*SEARCHED, *BLOCKS])
    after = verdict(spec(), facts(), [*SEARCHED, *BLOCKS, measured(13, LAYER, 11800, role=Role.PROBE)])
    assert after == before.model_copy(update={"tokens_per_second": 11800, "by_length": after.by_length})
    for old, new in zip(before.by_length, after.by_length, strict=True):
        assert new.config == old.config
        assert new.eager_seconds == pytest.approx(old.eager_seconds * 12400 / 11800)  # hot too
        if new.config == LAYER:
            assert new.seconds == pytest.approx(13 + new.amount / 11800) and new.seconds > old.seconds


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(measured(13, EAGER, 7000, role=Role.PROBE), id="of another config"),
        pytest.param(failed(13, LAYER, FailureKind.HANG, role=Role.PROBE), id="that failed"),
        pytest.param(stopped(13, LAYER, "budget", role=Role.PROBE), id="that the budget ended"),
    ],
)
def test_a_sustained_minute_that_says_nothing_of_the_winner(probe):
    found = verdict(spec(), facts(), [*SEARCHED, *BLOCKS, probe])
    assert found == verdict(spec(), facts(), [*SEARCHED, *BLOCKS])


def test_the_two_speedups_differ_where_eager_prefers_another_batch():
    records = [
        *[measured(0, EAGER, 8000), measured(1, EAGER_8, 9000), measured(2, LAYER_2, 12000)],
        *confirmations(3, (LAYER_2, [12000.0] * 2), (EAGER_8, [9000.0] * 2), (config(micro_batch=2), [6000.0] * 2)),
    ]
    found = verdict(spec(), facts(), records)
    assert (found.speedup, found.speedup_vs_best_eager) == (pytest.approx(2), pytest.approx(4 / 3))
    assert found.confirmed_by == (3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    "eager",
    [
        pytest.param([], id="the budget did not hold it"),
        pytest.param([failed(9, config(micro_batch=2), FailureKind.OOM, role=Role.CONFIRM)], id="it does not fit"),
    ],
)
def test_the_same_without_compile_may_be_missing(eager):
    records = [
        *[measured(0, EAGER, 8000), measured(1, EAGER_8, 9000), measured(2, LAYER_2, 12000)],
        *[*confirmations(3, (LAYER_2, [12000.0] * 2), (EAGER_8, [9000.0] * 2)), *eager],
    ]
    found = verdict(spec(), facts(), records)
    assert found.confirmed and found.speedup is None and found.speedup_vs_best_eager == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("records", "left_out"),
    [
        pytest.param([*SEARCHED, measured(4, EAGER_8, 9000)], [], id="nothing"),
        pytest.param(SEARCHED[:2], [GRAPHS], id="settings that usually win"),
        pytest.param([*SEARCHED[:2], stopped(2, GRAPHS, "budget")], [GRAPHS], id="stopped by the budget"),
        pytest.param([*SEARCHED[:2], failed(2, GRAPHS, FailureKind.BACKEND_UNSUPPORTED)], [], id="failed: it is known"),
        pytest.param([*SEARCHED, measured(4, LAYER_8, 14000)], [EAGER_8], id="the best batch without compile"),
        pytest.param(
            [*SEARCHED, measured(4, LAYER_8, 14000), failed(5, EAGER_8, FailureKind.OOM)],
            [],
            id="the best batch does not fit without compile",
        ),
        pytest.param(
            [
                *[*SEARCHED, measured(4, LAYER_8, 14000)],
                *confirmations(5, (LAYER_8, [14000.0] * 2), (EAGER, [8000.0] * 2), (EAGER_8, [9000.0] * 2)),
            ],
            [],
            id="confirmed though never searched",
        ),
    ],
)
def test_what_the_verdict_lacks_is_named(records, left_out):
    assert list(verdict(spec(), facts(), records).unmeasured) == left_out


def test_in_a_loss_the_figures_are_those_of_the_best_compiled_config():
    arms = ((LAYER, [6000.0] * 2), (EAGER, [8000.0] * 2), (GRAPHS, [5000.0] * 2))
    found = verdict(spec(), facts(), [*SEARCHED, *confirmations(4, *arms)])
    assert (found.config, found.tokens_per_second) == (EAGER, pytest.approx(8000))
    assert (found.result, found.speedup) == (Result.LOSS, pytest.approx(0.75))
    assert found.break_even_steps is None


@pytest.mark.parametrize(
    ("eager", "compiled", "steps"),
    [
        pytest.param(measured(0, EAGER, 8000), measured(1, LAYER, 16000, cold_seconds=13), 102, id="the same batch"),
        pytest.param(
            measured(0, EAGER, 8000), measured(1, LAYER_8, 16000, cold_seconds=13), 51, id="twice the tokens a step"
        ),
        pytest.param(measured(0, EAGER, 16000), measured(1, LAYER, 8000), None, id="never"),
    ],
)
def test_break_even_counts_the_steps_until_the_compile_is_earned(eager, compiled, steps):
    assert verdict(spec(), facts(), [eager, compiled]).break_even_steps == steps


def test_a_planned_run_may_be_too_short_for_compile():
    records = [measured(0, EAGER, 8000), measured(1, LAYER, 16000, cold_seconds=60)]
    assert verdict(spec(), facts(), records).result is Result.WIN
    short = verdict(spec(planned_tokens=80_000), facts(), records)
    assert (short.result, short.config) == (Result.LOSS, EAGER)
    assert short.speedup_vs_best_eager == pytest.approx(10 / 65)


def test_a_planned_run_may_be_given_in_steps():
    records = [measured(0, EAGER, 8000), measured(1, LAYER, 16000, cold_seconds=60)]
    short, long = (spec(planned_steps=steps, workload={"global_batch": 4}) for steps in (40, 4000))
    assert verdict(short, facts(), records).result is Result.LOSS
    assert verdict(long, facts(), records).result is Result.WIN


def test_a_warm_confirmation_still_owes_the_cold_compile():
    records = [measured(0, EAGER, 8000), measured(1, LAYER, 16000, cold_seconds=60)]
    warm = confirmations(2, (LAYER, [16000.0] * 2), (EAGER, [8000.0] * 2), cold_seconds=0)
    assert verdict(spec(planned_tokens=80_000), facts(), [*records, *warm]).result is Result.LOSS


QUICK = [measured(0, EAGER, 8000), measured(1, LAYER, 16000, cold_seconds=200)]  # 2048 tokens a step


@pytest.mark.parametrize(
    ("planned", "records", "best"),
    [
        pytest.param({}, QUICK, {500: EAGER, 5000: LAYER, 50000: LAYER}, id="a short run prefers eager"),
        pytest.param(
            {},
            [*QUICK, measured(2, config(scope="attention"), 10000, cold_seconds=1)],
            {500: config(scope="attention"), 5000: LAYER, 50000: LAYER},
            id="or what compiles quickly",
        ),
        pytest.param(
            {"planned_steps": 100, "workload": {"global_batch": 4}},
            QUICK,
            {100: EAGER, 500: EAGER, 5000: LAYER, 50000: LAYER},
            id="the user's own run in steps",
        ),
        pytest.param(
            {"planned_tokens": 2048 * 20_000},
            QUICK,
            {500: EAGER, 5000: LAYER, 20_000: LAYER, 50000: LAYER},
            id="and in tokens",
        ),
        pytest.param(
            {"planned_tokens": 2048 * 5000}, QUICK, {500: EAGER, 5000: LAYER, 50000: LAYER}, id="one of those lengths"
        ),
        pytest.param(
            {},
            [SEARCHED[0], *confirmations(1, (LAYER, noisy(8150, 5, 0.03)), (EAGER, [8000.0] * 5))],
            {500: EAGER, 5000: EAGER, 50000: EAGER},
            id="a tie is one for long runs too",
        ),
        pytest.param(
            {},
            [
                *SEARCHED,
                *confirmations(4, (LAYER, noisy(12000, 5, 0.03)), (EAGER, [8000.0] * 5), (GRAPHS, [12100] * 5)),
            ],
            {500: LAYER, 5000: LAYER, 50000: LAYER},
            id="the simpler winner stays the winner",
        ),
        pytest.param({}, [], {}, id="nothing measured"),
    ],
)
def test_the_best_config_by_length_of_the_run(planned, records, best):
    found = verdict(spec(**dict(planned)), facts(), records).by_length
    assert {run.steps: run.config for run in found} == best
    assert [run.steps for run in found] == list(best)


def test_runs_of_a_length_pay_for_their_compile():
    short, longer, _ = verdict(spec(), facts(), QUICK).by_length
    assert (short.amount, short.seconds, short.eager_seconds) == (1_024_000, pytest.approx(128), pytest.approx(128))
    assert (longer.seconds, longer.eager_seconds) == (pytest.approx(200 + 640), pytest.approx(1280))


def test_a_confirmation_says_more_of_a_run_s_length_than_the_search():
    found = verdict(spec(), facts(), [*QUICK, *confirmations(2, (LAYER, [10000.0] * 2), (EAGER, [8000.0] * 2))])
    assert found.by_length[1].seconds == pytest.approx(200 + 5000 * 2048 / 10000)


def test_without_an_eager_measurement_a_run_is_compared_with_none():
    records = [failed(0, EAGER, FailureKind.OOM, role=Role.BASELINE), measured(1, LAYER, 9000)]
    assert {run.eager_seconds for run in verdict(spec(), facts(), records).by_length} == {None}


def test_plain_compile_cannot_win_where_the_space_does_not_hold_it():
    records = [measured(0, EAGER, 8000), measured(1, LAYER, 12000), measured(2, MODEL, 20000, role=Role.BASELINE)]
    found = verdict(spec(space=SMALL_SPACE), facts(), records)
    assert (found.config, found.speedup_vs_plain_compile) == (LAYER, pytest.approx(0.6))


def test_a_paired_plan_without_two_blocks_is_told_by_its_single_runs():
    study = spec(space=SMALL_SPACE, plan=Paired(configs=(EAGER, MODEL)))
    found = verdict(study, facts(), [confirmed(0, EAGER, 8000), confirmed(1, MODEL, 12000)])
    assert (found.result, found.config, found.confirmed) == (Result.WIN, MODEL, False)


@pytest.mark.parametrize(
    ("record", "tight"),
    [
        pytest.param(measured(0, EAGER, 1, reserved_gib=128), False, id="below the headroom"),
        pytest.param(measured(0, EAGER, 1, reserved_gib=129), True, id="above it"),
        pytest.param(
            measured(0, EAGER, 1, reserved_gib=100, device_memory_bytes=135 << 30), True, id="by the driver's view"
        ),
        pytest.param(measured(0, EAGER, 1, degraded=("tight_memory",)), True, id="by its flag"),
    ],
)
def test_tight_memory(record, tight):
    assert tight_memory(spec(), facts(), record.measurement) is tight


def test_best_config_is_the_verdicts_with_what_to_expect_of_it():
    speeds = [9000.0, 12100.0, 12000.0, 12400.0]
    blocks = confirmations(4, (LAYER, speeds), (EAGER, [8000.0] * 4), (GRAPHS, [8000.0] * 4))
    study = spec(workload={"global_batch": 32, "sequence_length": 512})
    best = best_config("mine", study, facts(), [*SEARCHED, *blocks])
    assert best is not None
    assert (best.study, best.result, best.config) == ("mine", "win", LAYER)
    speed, low, high = best.expected.tokens_per_second
    assert (speed, low, high) == (12100, pytest.approx(12000 / 1.01), pytest.approx(12400 / 0.99))
    step, shortest, longest = best.expected.step_seconds
    assert step == pytest.approx(2048 / 12100)
    assert (shortest, longest) == (pytest.approx(2048 / 12400 * 0.99), pytest.approx(2048 / 12000 * 1.01))
    assert (best.expected.compile_seconds, best.expected.graphs) == (13, 2)
    assert best.evidence.speedup == pytest.approx((12100 * 12000 * 12400) ** (1 / 3) / 8000)
    assert best.evidence.confirmed_by == (7, 8, 9, 10, 11, 12, 13, 14, 15)  # no first block
    assert (best.made_for.gpu, best.made_for.torch, best.made_for.triton) == ("NVIDIA H200", "2.13", "3.7")
    assert (best.workload.micro_batch, best.workload.gradient_accumulation) == (4, 8)
    assert best.workload.spec.global_batch == 32


def test_after_a_sustained_minute_its_speed_is_expected():
    probe = measured(13, LAYER, 11800, role=Role.PROBE)
    best = best_config("mine", spec(), facts(), [*SEARCHED, *BLOCKS, probe])
    assert best is not None
    speed, low, high = best.expected.tokens_per_second
    assert (speed, low, high) == (11800, pytest.approx(11800 / 1.01), pytest.approx(12400 / 0.99))
    assert best.expected.step_seconds[0] == pytest.approx(2048 / 11800)
    assert probe.number not in best.evidence.confirmed_by


def test_best_config_of_a_provisional_verdict_expects_what_the_search_saw():
    best = best_config("mine", spec(), facts(), SEARCHED)
    assert best is not None and best.expected.tokens_per_second[0] == 12000 and best.evidence.confirmed_by == ()


def test_there_is_no_best_config_where_nothing_was_measured():
    assert best_config("mine", spec(), facts(), [failed(0, EAGER, FailureKind.HANG)]) is None


TODAY = config(scope="model", micro_batch=2)


@pytest.mark.parametrize(
    ("records", "ratio"),
    [
        pytest.param(SEARCHED, None, id="not measured"),
        pytest.param([*SEARCHED, measured(4, TODAY, 6000)], 2, id="by the search"),
        pytest.param(
            [
                *[*SEARCHED, measured(4, TODAY, 6000)],
                *confirmations(5, (LAYER, [12400.0] * 3), (EAGER, [8000.0] * 3), (TODAY, [3100.0] * 3)),
            ],
            4,
            id="by confirmations of both",
        ),
        pytest.param([*SEARCHED, measured(4, TODAY, 20000)], 1, id="nothing beats it"),
    ],
)
def test_the_winner_is_compared_with_what_the_user_runs_today(records, ratio):
    found = verdict(spec(against=TODAY), facts(), records).speedup_over_against
    assert found == (None if ratio is None else pytest.approx(ratio))
    assert verdict(spec(), facts(), records).speedup_over_against is None
