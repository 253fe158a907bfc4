"""What blocks of confirmations prove: Student's quantiles, the choice between compiled configs, the interval."""

from __future__ import annotations

import math

import pytest

from autocompile.records import Result
from autocompile.search import verdict
from autocompile.search.student import mean_interval, quantile
from autocompile.spec import Paired
from tests.unit.search_cases import (
    EAGER,
    GRAPHS,
    LAYER,
    MODEL,
    SMALL_SPACE,
    config,
    confirmations,
    facts,
    measured,
    noisy,
    spec,
)

EAGER_8, LAYER_8 = config(micro_batch=8), config(scope="layer", micro_batch=8)


@pytest.mark.parametrize(
    ("p", "degrees", "value"),
    [
        (0.5, 3, 0.0),
        (0.75, 1, 1.000),
        (0.9, 2, 1.886),
        (0.95, 4, 2.132),
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 5, 2.571),
        (0.975, 11, 2.201),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
        (0.995, 1, 63.657),
        (0.995, 2, 9.925),
        (0.995, 4, 4.604),
        (0.995, 11, 3.106),
        (0.9995, 1, 636.619),
        (0.9995, 10, 4.587),
    ],
)
def test_quantiles_are_those_of_the_printed_tables(p, degrees, value):
    assert quantile(p, degrees) == pytest.approx(value, abs=0.0006)


def test_an_interval_lies_around_the_mean():
    found = mean_interval([1, 2, 3, 4, 5], alpha=0.05)
    reach = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.mean, found.n) == (3, 5)
    assert (found.low, found.high) == (pytest.approx(3 - reach, abs=1e-3), pytest.approx(3 + reach, abs=1e-3))
    assert found.half_width == pytest.approx(reach, abs=1e-3)


def test_equal_values_have_no_width():
    found = mean_interval([2.0, 2.0], alpha=0.05)
    assert found.low == found.mean == found.high == 2


def steady(speed, n=6):
    return [float(speed)] * n


def told(*arms, study=None):
    """The verdict where nothing but these confirmations is known."""
    return verdict(study or spec(), facts(), confirmations(0, *arms))


def wide(speed):
    """So noisy that nothing within five percent can be told from it, in six rounds that count."""
    return noisy(speed, 7, 0.05)


@pytest.mark.parametrize(
    ("layer", "graphs", "best"),
    [
        pytest.param(steady(12000), steady(11000), LAYER, id="the simpler one is faster"),
        pytest.param(steady(12000), steady(12012), GRAPHS, id="the other one is, without any noise"),
        pytest.param(noisy(12000, 6, 0.002), steady(12200), GRAPHS, id="and outside the noise"),
        pytest.param(noisy(12000, 6, 0.02), steady(12200), LAYER, id="within the noise the simpler one"),
        pytest.param(wide(12000), steady(12300, 7), LAYER, id="though it is slower by 2.6 %"),
        pytest.param(wide(12000), steady(12400, 7), GRAPHS, id="but never by more than 3 %"),
        pytest.param(steady(12000)[:2], steady(12060)[:2], GRAPHS, id="two blocks without noise"),
        pytest.param(noisy(12000, 2, 0.01), steady(12060)[:2], LAYER, id="two blocks with noise"),
    ],
)
def test_the_winner_between_two_compiled_configs(layer, graphs, best):
    found = told((LAYER, layer), (EAGER, steady(8000, len(layer))), (GRAPHS, graphs))
    assert (found.result, found.config, found.confirmed) == (Result.WIN, best, True)


def test_departures_are_counted_from_the_defaults_under_what_is_pinned():
    arms = ((LAYER_8, noisy(12000, 6, 0.02)), (EAGER_8, steady(8000)), (LAYER, noisy(12000, 6, 0.021)))
    assert told(*arms).config == LAYER
    assert told(*arms, study=spec(pinned={"micro_batch": 8})).config == LAYER_8


def test_simplicity_does_not_cost_a_win():
    arms = ((GRAPHS, steady(8240)), (EAGER, steady(8000)), (LAYER, noisy(8090, 6, 0.03)))
    found = told(*arms)
    assert (found.result, found.config) == (Result.WIN, GRAPHS)
    assert told(*arms[1:]).result is Result.TIE


@pytest.mark.parametrize(
    ("compiled", "result"),
    [
        pytest.param(noisy(8300, 6, 0.005), Result.WIN, id="faster beyond the noise"),
        pytest.param(steady(8081), Result.WIN, id="by little more than a percent, without noise"),
        pytest.param(steady(8079), Result.TIE, id="by less than a percent"),
        pytest.param(noisy(8300, 6, 0.05), Result.TIE, id="faster within the noise"),
        pytest.param(steady(8000), Result.TIE, id="exactly as fast"),
        pytest.param(noisy(7900, 6, 0.05), Result.TIE, id="slower within the noise"),
        pytest.param(steady(7990), Result.LOSS, id="slower by little, without noise"),
        pytest.param(noisy(7700, 6, 0.005), Result.LOSS, id="slower beyond the noise"),
    ],
)
def test_the_result_is_what_the_interval_proves(compiled, result):
    found = told((LAYER, compiled), (EAGER, steady(8000)))
    assert found.result is result
    assert found.config == (LAYER if result is Result.WIN else EAGER)
    assert found.speedup_low <= found.speedup_vs_best_eager <= found.speedup_high


def test_the_interval_is_students_on_the_logarithms_of_the_ratios_within_a_block():
    speeds, machine = [8800, 9000, 8900, 9100, 8950, 9050], [0.8, 1.0, 1.1, 0.9, 1.2, 1.0]
    arms = (LAYER, [v * m for v, m in zip(speeds, machine, strict=True)]), (EAGER, [8000 * m for m in machine])
    found = told(*arms)  # what the machine does to a whole block cancels out
    logs = [math.log(value / 8000) for value in speeds[1:]]
    expected = mean_interval(logs, alpha=0.05)
    assert found.speedup_vs_best_eager == pytest.approx(math.exp(expected.mean))
    assert found.speedup_low == pytest.approx(math.exp(expected.low))
    assert found.speedup_high == pytest.approx(math.exp(expected.high))
    assert found.rounds == 5


@pytest.mark.parametrize(
    ("blocks", "rounds"),
    [
        pytest.param(0, 0, id="none"),
        pytest.param(1, 0, id="one has no spread"),
        pytest.param(2, 2, id="two"),
        pytest.param(3, 3, id="so few are all kept"),
        pytest.param(4, 3, id="of more the first is dropped"),
        pytest.param(13, 12, id="as many as there ever are"),
    ],
)
def test_the_first_block_counts_only_while_there_are_few(blocks, rounds):
    searched = [measured(0, EAGER, 8000), measured(1, LAYER, 9000)]
    arms = (LAYER, [5000.0, *steady(9000, 12)][:blocks]), (EAGER, steady(8000, blocks))
    found = verdict(spec(), facts(), [*searched, *(confirmations(2, *arms) if blocks else [])])
    assert (found.rounds, found.confirmed) == (rounds, rounds > 0)
    if blocks > 3:
        assert found.speedup_vs_best_eager == pytest.approx(9 / 8)
        assert found.confirmed_by == tuple(range(4, 2 + 2 * blocks))


def width(*arms):
    found = told(*arms)
    return math.log(found.speedup_high / found.speedup_low)


def test_every_choice_widens_the_interval():
    best, other, third = (LAYER, noisy(12000, 6, 0.01)), (GRAPHS, steady(10000)), (MODEL, steady(10000))
    eager, eager_8 = (EAGER, steady(8000)), (EAGER_8, steady(7000))
    widths = [width(best, eager), width(best, eager, other), width(best, eager, other, third)]
    by_table = [quantile(1 - 0.025 / n, 4) / quantile(0.975, 4) for n in (1, 2, 3)]
    assert [one / widths[0] for one in widths] == pytest.approx(by_table)
    assert widths[0] < widths[1] < widths[2]
    assert width(best, eager, eager_8) == pytest.approx(widths[1])  # the better of two eager ones was chosen too


def test_a_config_that_ran_in_one_block_only_is_no_choice():
    best, eager = (LAYER, noisy(12000, 6, 0.01)), (EAGER, steady(8000))
    assert width(best, eager, (GRAPHS, [20000.0])) == pytest.approx(width(best, eager))


def test_compile_is_compared_with_the_faster_eager_config():
    found = told((LAYER, steady(9000)), (EAGER_8, steady(8500)), (EAGER, steady(8000)))
    assert (found.speedup, found.speedup_vs_best_eager) == (pytest.approx(9 / 8), pytest.approx(9 / 8.5))


def test_without_anything_compiled_the_fastest_eager_config_is_confirmed():
    found = told((EAGER, steady(8000)), (EAGER_8, steady(8500)), study=spec(pinned={"scope": "none"}))
    assert (found.result, found.config, found.confirmed, found.rounds) == (Result.TIE, EAGER_8, True, 5)
    assert found.speedup_vs_best_eager is None


@pytest.mark.parametrize(
    ("arms", "result", "best", "ratio"),
    [
        pytest.param([(EAGER, 8000), (LAYER, 9000)], Result.WIN, LAYER, 9 / 8, id="eager first"),
        pytest.param([(LAYER, 9000), (EAGER, 8000)], Result.WIN, LAYER, 9 / 8, id="eager last"),
        pytest.param([(LAYER, 9000), (GRAPHS, 10000)], Result.WIN, GRAPHS, 10 / 9, id="no eager: the first is beaten"),
        pytest.param([(GRAPHS, 10000), (LAYER, 9000)], Result.LOSS, GRAPHS, 0.9, id="no eager: the first is not"),
        pytest.param([(LAYER, 9000), (LAYER, 9000)], Result.TIE, LAYER, 1, id="equal configs"),
        pytest.param([(EAGER, 8000), (EAGER_8, 9000)], Result.WIN, EAGER_8, 9 / 8, id="only eager"),
        pytest.param([(LAYER, 9000), (MODEL, 9900), (GRAPHS, 9900)], Result.WIN, MODEL, 1.1, id="three, none eager"),
    ],
)
def test_paired_plans_need_no_search_space_and_no_eager(arms, result, best, ratio):
    study = spec(space=SMALL_SPACE, plan=Paired(configs=tuple(settings for settings, _ in arms)))
    found = told(*((settings, steady(speed)) for settings, speed in arms), study=study)
    assert (found.result, found.config, found.confirmed, found.rounds) == (result, best, True, 5)
    assert found.speedup_vs_best_eager == pytest.approx(ratio)
