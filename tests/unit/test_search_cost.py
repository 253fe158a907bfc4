"""Predicted seconds: facts where there are any, else scaled from what compile was found to cost."""

from __future__ import annotations

import pytest

from autocompile.records import FailureKind, Numerics, Telemetry
from autocompile.search.cost import compile_seconds, confirm_seconds, costs, first_confirm_seconds, slice_seconds
from autocompile.spec import Role
from tests.unit.search_cases import (
    CPU,
    EAGER,
    GRAPHS,
    LAYER,
    MODEL,
    config,
    confirmed,
    facts,
    failed,
    measured,
    spec,
    stopped,
)

DYNAMIC = config(scope="layer", dynamic="true")
AUTOTUNED = config(scope="layer", mode="max-autotune")


def with_telemetry(record, telemetry):
    return record.model_copy(update={"outcome": record.outcome.model_copy(update={"telemetry": telemetry})})


SEEN = [measured(0, EAGER, 8000, seconds=30), measured(1, LAYER, 14000, seconds=45, cold_seconds=13)]


@pytest.mark.parametrize(
    ("known", "records", "settings", "seconds"),
    [
        pytest.param(facts(), [], EAGER, 0, id="eager compiles nothing"),
        pytest.param(facts(), [], LAYER, 20, id="a layer on a GPU"),
        pytest.param(facts(CPU), [], LAYER, 15, id="a layer on a CPU"),
        pytest.param(facts(), [], MODEL, 180, id="a whole model of 32 layers"),
        pytest.param(facts(layers=4), [], MODEL, 40, id="a whole model of 4 layers"),
        pytest.param(facts(), [], config(scope="attention"), 14, id="attention alone"),
        pytest.param(facts(), [], config(scope="*.q_proj"), 20, id="a pattern"),
        pytest.param(facts(), SEEN, LAYER, 13, id="as observed"),
        pytest.param(facts(), SEEN, config(scope="layer", micro_batch=16), 13, id="as observed at another micro-batch"),
        pytest.param(facts(), SEEN, MODEL, 117, id="whole model from an observed layer"),
        pytest.param(facts(), SEEN, GRAPHS, 13, id="CUDA graphs from an observed layer"),
        pytest.param(facts(), SEEN, AUTOTUNED, 130, id="autotuning from an observed layer"),
        pytest.param(facts(), SEEN, DYNAMIC, 78, id="dynamic shapes from an observed layer"),
        pytest.param(
            facts(),
            [*SEEN, measured(2, MODEL, 14000, cold_seconds=100)],
            config(scope="model", mode="max-autotune"),
            1000,
            id="from the nearest one observed",
        ),
    ],
)
def test_compile_seconds(known, records, settings, seconds):
    assert compile_seconds(costs(spec(), known, records), settings) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("records", "settings", "seconds"),
    [
        pytest.param([], EAGER, 60, id="nothing seen"),
        pytest.param([], LAYER, 80, id="nothing seen, and a compile"),
        pytest.param(SEEN, LAYER, 45, id="as observed"),
        pytest.param(SEEN[:1], LAYER, 50, id="the eager slice and a compile"),
        pytest.param(SEEN[:1], config(scope="layer", fullgraph=True), 50, id="the same for a variant"),
        pytest.param(SEEN[1:], EAGER, 32, id="a compiled slice without its compile"),
        pytest.param(SEEN[:1], config(micro_batch=1), 30, id="a smaller micro-batch takes no less"),
        pytest.param(SEEN[:1], config(micro_batch=16), 30 + 3 * 0.256 * 10, id="a larger one has longer steps"),
        pytest.param([*SEEN, stopped(2, GRAPHS, "budget", seconds=99)], GRAPHS, 99, id="longer than what was cut"),
        pytest.param([*SEEN, failed(2, GRAPHS, FailureKind.OOM, seconds=3)], GRAPHS, 43, id="a failure says nothing"),
        pytest.param([measured(0, EAGER, 2048, seconds=None)], EAGER, 10, id="nobody watched it to its end"),
    ],
)
def test_slice_seconds(records, settings, seconds):
    assert slice_seconds(costs(spec(), facts(), records), settings) == pytest.approx(seconds)


def test_a_fixed_global_batch_keeps_the_work_of_a_step():
    study = spec(workload={"global_batch": 64})
    assert slice_seconds(costs(study, facts(), SEEN[:1]), config(micro_batch=16)) == 30


WARM = [confirmed(n, LAYER, 14000, seconds=seconds, cold_seconds=40) for n, seconds in ((2, 20), (3, 22), (4, 21))]
COMPARED = [confirmed(0, LAYER, 14000, seconds=30, cold_seconds=0), confirmed(1, EAGER, 8000, seconds=25)]
CHECKED = with_telemetry(
    measured(0, LAYER, 14000, seconds=60), Telemetry(numerics=Numerics(checked=True, seconds=20.0))
)
FIRST = with_telemetry(
    confirmed(0, LAYER, 14000, seconds=60, cache="cold"), Telemetry(numerics=Numerics(checked=True, seconds=20.0))
)
SUSTAINED = [measured(2, LAYER, 14000, role=Role.PROBE, seconds=99)]


@pytest.mark.parametrize(
    ("records", "settings", "first", "seconds"),
    [
        pytest.param(SEEN, EAGER, 38, 38, id="eager: a longer window"),
        pytest.param(SEEN, LAYER, 45 - 13 * 2 / 3 + 8, 45 - 13 * 2 / 3 + 8, id="compiled: a third of the compile too"),
        pytest.param([*SEEN, *WARM], LAYER, 45 - 13 * 2 / 3 + 8, 22, id="the longest that was seen"),
        pytest.param([*SEEN, *WARM], GRAPHS, 43 - 13 * 2 / 3 + 8, 43 - 13 * 2 / 3 + 8, id="seen of another config"),
        pytest.param([*SEEN, *SUSTAINED], LAYER, 45 - 13 * 2 / 3 + 8, 45 - 13 * 2 / 3 + 8, id="a sustained minute"),
        pytest.param(COMPARED, LAYER, 38, 30, id="nothing but confirmations"),
        pytest.param([FIRST], LAYER, 60 - 13 * 2 / 3 + 8, 60 - 20 - 13 * 2 / 3, id="the first of a paired plan"),
        pytest.param(
            [FIRST, confirmed(1, LAYER, 14000)],
            LAYER,
            60 - 13 * 2 / 3 + 8,
            30,
            id="the first fills what the second finds",
        ),
        pytest.param([CHECKED], LAYER, 60 - 13 * 2 / 3 - 20 + 8, 60 - 13 * 2 / 3 - 20 + 8, id="its numerics are known"),
    ],
)
def test_confirm_seconds(records, settings, first, seconds):
    known = costs(spec(), facts(), records)
    assert first_confirm_seconds(known, settings) == pytest.approx(first)
    assert confirm_seconds(known, settings) == pytest.approx(seconds)


@pytest.mark.parametrize("settings", [EAGER, LAYER, GRAPHS, MODEL, AUTOTUNED, config(scope="layer", micro_batch=8)])
def test_confirmations_change_no_prediction_of_a_search_slice(settings):
    before, after = (costs(spec(), facts(), records) for records in (SEEN, [*SEEN, *WARM]))
    assert slice_seconds(after, settings) == slice_seconds(before, settings)
    assert compile_seconds(after, settings) == compile_seconds(before, settings)
