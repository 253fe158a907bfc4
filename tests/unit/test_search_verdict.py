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
    facts,
    failed,
    measured,
    spec,
    stopped,
)

EAGER_8, LAYER_8, LAYER_2 = (
    config(micro_batch=8),
    config(scope="layer", micro_batch=8),
    config(scope="layer", micro_batch=2),
)


def confirmed(number, settings, speed, **fields):
    return measured(number, settings, speed, role=Role.CONFIRM, **fields)


SEARCHED = [
    measured(0, EAGER, 8000, role=Role.BASELINE),
    measured(1, LAYER, 12000),
    measured(2, GRAPHS, 11900),
    measured(3, MODEL, 10000, role=Role.BASELINE),
]
ROUND = [confirmed(4, LAYER, 12400), confirmed(5, EAGER, 8000), confirmed(6, GRAPHS, 12200)]


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
        pytest.param([*SEARCHED, *ROUND[:2]], Result.WIN, LAYER, False, id="half a round"),
        pytest.param([*SEARCHED, *ROUND], Result.WIN, LAYER, True, id="one complete round"),
        pytest.param(
            [*SEARCHED, *ROUND, measured(7, LAYER_8, 20000)], Result.WIN, LAYER, True, id="later search undoes no round"
        ),
        pytest.param(
            [*SEARCHED, *ROUND, measured(7, LAYER_8, 20000), confirmed(8, LAYER_8, 19000)],
            Result.WIN,
            LAYER_8,
            True,
            id="a later round with a new best",
        ),
        pytest.param(
            [*SEARCHED, confirmed(4, LAYER, 9000), confirmed(5, EAGER, 8000), confirmed(6, GRAPHS, 11900)],
            Result.WIN,
            GRAPHS,
            True,
            id="only confirmations choose the winner",
        ),
        pytest.param(
            [*SEARCHED, confirmed(4, LAYER, 12000), confirmed(5, EAGER, 8000), confirmed(6, GRAPHS, 12300)],
            Result.WIN,
            LAYER,
            True,
            id="within the allowance the simpler one",
        ),
        pytest.param(
            [*SEARCHED, confirmed(4, LAYER, 12000), confirmed(5, EAGER, 8000), confirmed(6, GRAPHS, 12500)],
            Result.WIN,
            GRAPHS,
            True,
            id="beyond the allowance the faster one",
        ),
        pytest.param(
            [*SEARCHED, confirmed(4, LAYER, 8200), confirmed(5, EAGER, 8000), confirmed(6, GRAPHS, 8000)],
            Result.TIE,
            EAGER,
            True,
            id="faster by less than the allowance",
        ),
        pytest.param(
            [*SEARCHED, confirmed(4, LAYER, 7000), confirmed(5, EAGER, 8000), confirmed(6, GRAPHS, 7000)],
            Result.LOSS,
            EAGER,
            True,
            id="slower",
        ),
        pytest.param(
            [*SEARCHED, *ROUND[:2], failed(6, GRAPHS, FailureKind.NUMERICS_MISMATCH, role=Role.CONFIRM)],
            Result.WIN,
            LAYER,
            True,
            id="a finalist that fails is out",
        ),
        pytest.param(
            [*SEARCHED, *ROUND[:2], stopped(6, GRAPHS, "budget", role=Role.CONFIRM)],
            Result.WIN,
            LAYER,
            False,
            id="the budget ended the round",
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
        pytest.param([measured(0, LAYER, 9000)], Result.TIE, LAYER, False, id="eager was not tried"),
    ],
)
def test_verdict(records, result, best, is_confirmed):
    found = verdict(spec(), facts(), records)
    assert (found.result, found.config, found.confirmed) == (result, best, is_confirmed)
    assert bool(found.confirmed_by) is is_confirmed


def test_the_ratios_are_those_of_the_confirmations():
    found = verdict(spec(), facts(), [*SEARCHED, *ROUND])
    assert found.tokens_per_second == 12400
    assert found.speedup == found.speedup_vs_best_eager == pytest.approx(1.55)
    assert (found.speedup_low, found.speedup_high) == (pytest.approx(1.55 * 0.97), pytest.approx(1.55 * 1.03))
    assert found.speedup_vs_plain_compile == pytest.approx(1.24)
    assert found.confirmed_by == (4, 5, 6)


def test_the_two_speedups_differ_where_eager_prefers_another_batch():
    records = [
        *[measured(0, EAGER, 8000), measured(1, EAGER_8, 9000), measured(2, LAYER_2, 12000)],
        *[confirmed(3, LAYER_2, 12000), confirmed(4, EAGER_8, 9000), confirmed(5, config(micro_batch=2), 6000)],
    ]
    found = verdict(spec(), facts(), records)
    assert (found.speedup, found.speedup_vs_best_eager) == (pytest.approx(2), pytest.approx(4 / 3))
    assert found.confirmed_by == (3, 4, 5)


@pytest.mark.parametrize(
    "eager",
    [
        pytest.param([], id="the budget did not hold it"),
        pytest.param([failed(5, config(micro_batch=2), FailureKind.OOM, role=Role.CONFIRM)], id="it does not fit"),
    ],
)
def test_the_same_without_compile_may_be_missing(eager):
    records = [
        *[measured(0, EAGER, 8000), measured(1, EAGER_8, 9000), measured(2, LAYER_2, 12000)],
        *[confirmed(3, LAYER_2, 12000), confirmed(4, EAGER_8, 9000), *eager],
    ]
    found = verdict(spec(), facts(), records)
    assert found.confirmed and found.speedup is None and found.speedup_vs_best_eager == pytest.approx(4 / 3)


def test_in_a_loss_the_figures_are_those_of_the_best_compiled_config():
    records = [*SEARCHED, confirmed(4, LAYER, 6000), confirmed(5, EAGER, 8000), confirmed(6, GRAPHS, 5000)]
    found = verdict(spec(), facts(), records)
    assert (found.config, found.tokens_per_second, found.speedup) == (EAGER, 8000, pytest.approx(0.75))
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
    records += [confirmed(2, LAYER, 16000, cold_seconds=0), confirmed(3, EAGER, 8000)]
    assert verdict(spec(planned_tokens=80_000), facts(), records).result is Result.LOSS


def test_plain_compile_cannot_win_where_the_space_does_not_hold_it():
    records = [measured(0, EAGER, 8000), measured(1, LAYER, 12000), measured(2, MODEL, 20000, role=Role.BASELINE)]
    found = verdict(spec(space=SMALL_SPACE), facts(), records)
    assert (found.config, found.speedup_vs_plain_compile) == (LAYER, pytest.approx(0.6))


def test_paired_configs_need_not_be_in_the_space():
    study = spec(space=SMALL_SPACE, plan=Paired(configs=(EAGER, MODEL)))
    found = verdict(study, facts(), [confirmed(0, EAGER, 8000), confirmed(1, MODEL, 12000)])
    assert (found.result, found.config, found.confirmed_by) == (Result.WIN, MODEL, (0, 1))


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
    best = best_config(
        "mine", spec(workload={"global_batch": 32, "sequence_length": 512}), facts(), [*SEARCHED, *ROUND]
    )
    assert best is not None
    assert (best.study, best.result, best.config) == ("mine", "win", LAYER)
    speed, low, high = best.expected.tokens_per_second
    assert speed == 12400 and low == pytest.approx(12400 / 1.01) and high == pytest.approx(12400 / 0.99)
    assert (best.expected.compile_seconds, best.expected.graphs) == (13, 2)
    assert (best.evidence.speedup, best.evidence.confirmed_by) == (pytest.approx(1.55), (4, 5))  # graphs accumulate
    assert (best.made_for.gpu, best.made_for.torch, best.made_for.triton) == ("NVIDIA H200", "2.13", "3.7")
    assert (best.workload.micro_batch, best.workload.gradient_accumulation) == (4, 8)
    assert best.workload.spec.global_batch == 32


def test_best_config_of_a_provisional_verdict_expects_what_the_search_saw():
    best = best_config("mine", spec(), facts(), SEARCHED)
    assert best is not None and best.expected.tokens_per_second[0] == 12000 and best.evidence.confirmed_by == ()


def test_there_is_no_best_config_where_nothing_was_measured():
    assert best_config("mine", spec(), facts(), [failed(0, EAGER, FailureKind.HANG)]) is None
