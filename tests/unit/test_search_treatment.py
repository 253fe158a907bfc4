"""What failures call for: once more and how, the end of the search, the end of the study."""

from __future__ import annotations

import pytest

from autocompile.failure_texts import CACHE_FOLDER, COMPILE_WORKERS, SPARE_CACHE_FOLDER
from autocompile.records import Failed, FailureKind, State
from autocompile.search import Measure, abort_reason, brake_reason, next_step
from autocompile.search.treatment import Treatment, deserves_repeat, is_over, needs_spare_cache, state_after, treatment
from autocompile.spec import Role
from tests.unit.search_cases import EAGER, GRAPHS, LAYER, config, facts, failed, measured, running, spec, stopped

K = FailureKind
PAIR = config(scope="layer", mode="reduce-overhead", gradient_checkpointing=True)
CUT = stopped(0, LAYER, "budget").stopped


def named(record, subkind):
    """The record with this subkind of its failure."""
    failure = record.failure.model_copy(update={"subkind": subkind})
    return record.model_copy(update={"outcome": Failed(failure=failure)})


def cut(record):
    """The record of a slice that the budget ended, though its failure has a name."""
    return record.model_copy(update={"stopped": CUT})


def faults(kind, *numbers, settings=LAYER, state=None):
    return [failed(number, settings, kind, state=state) for number in numbers]


@pytest.mark.parametrize(
    ("attempts", "repeat", "over"),
    [
        pytest.param([], False, False, id="never tried"),
        pytest.param([running(0, LAYER)], False, False, id="running"),
        pytest.param([measured(0, LAYER, 9000)], False, True, id="measured"),
        pytest.param(faults(K.OOM, 0), False, True, id="out of memory"),
        pytest.param(faults(K.RECOMPILE_STORM, 0), False, True, id="a recompile storm"),
        pytest.param(faults(K.GRAPH_BREAK, 0), False, True, id="a graph break"),
        pytest.param(faults(K.BACKEND_UNSUPPORTED, 0), False, True, id="no kernel"),
        pytest.param(faults(K.COMPILE_TIMEOUT, 0), False, True, id="a compile without end"),
        pytest.param(faults(K.NUMERICS_MISMATCH, 0), False, True, id="wrong numbers"),
        pytest.param(faults(K.WORKLOAD_ERROR, 0), False, True, id="the workload's error"),
        pytest.param(faults(K.UNKNOWN, 0), False, True, id="nobody knows"),
        pytest.param(faults(K.HOST_OOM, 0), True, False, id="killed"),
        pytest.param(faults(K.HOST_OOM, 0, 1), False, True, id="killed twice"),
        pytest.param(faults(K.HANG, 0), True, False, id="a hang"),
        pytest.param(faults(K.HANG, 0, 1), False, True, id="a hang twice"),
        pytest.param(faults(K.COMPILE_ERROR, 0), True, False, id="a compile error"),
        pytest.param(faults(K.COMPILE_ERROR, 0, 1), False, True, id="a compile error twice"),
        pytest.param(
            [named(*faults(K.COMPILE_ERROR, 0), "cudagraph_liveness")], False, True, id="a compile error with a name"
        ),
        pytest.param(faults(K.COMPILE_ERROR, 0, settings=PAIR), False, True, id="a pair known to fail: one try"),
        pytest.param(faults(K.GPU_FAULT, 0), True, False, id="a fault of the GPU"),
        pytest.param(
            [*faults(K.GPU_FAULT, 0), *faults(K.GPU_FAULT, 1, state=State.PRUNED)],
            False,
            True,
            id="in a new process too",
        ),
        pytest.param(faults(K.INFRASTRUCTURE, 0), True, False, id="the machine"),
        pytest.param(faults(K.INFRASTRUCTURE, 0, 1), False, True, id="the machine twice"),
        pytest.param([*faults(K.HOST_OOM, 0), measured(1, LAYER, 9000)], False, True, id="what was done helped"),
        pytest.param(
            [*faults(K.INFRASTRUCTURE, 0), measured(1, LAYER, 9000), *faults(K.INFRASTRUCTURE, 2)],
            True,
            False,
            id="a fault long after another is a first one",
        ),
        pytest.param([stopped(n, LAYER, "budget") for n in range(3)], True, False, id="ended by the budget ever again"),
        pytest.param([cut(*faults(K.COMPILE_TIMEOUT, 0))], True, False, id="a compile that the budget cut short"),
        pytest.param(
            [stopped(0, LAYER, "interrupted"), *faults(K.HANG, 1)], True, False, id="an interruption is no attempt"
        ),
    ],
)
def test_once_more_or_not(attempts, repeat, over):
    assert (deserves_repeat(attempts), is_over(attempts)) == (repeat, over)


@pytest.mark.parametrize(
    ("attempts", "treated"),
    [
        pytest.param([], Treatment(), id="the first time as usual"),
        pytest.param(faults(K.HOST_OOM, 0), Treatment(compile_threads=1), id="killed: one compile thread"),
        pytest.param(faults(K.HANG, 0), Treatment(compile_threads=1), id="a hang may be one of the workers"),
        pytest.param(
            [named(*faults(K.INFRASTRUCTURE, 0), COMPILE_WORKERS)], Treatment(compile_threads=1), id="dead workers"
        ),
        pytest.param(faults(K.COMPILE_ERROR, 0), Treatment(fresh_caches=1), id="a compile error: a fresh cache"),
        pytest.param(faults(K.COMPILE_ERROR, 0, 1), Treatment(fresh_caches=2), id="and another one"),
        pytest.param(faults(K.GPU_FAULT, 0), Treatment(), id="a fault of the GPU: a new process is enough"),
        pytest.param(
            [*faults(K.HOST_OOM, 0), measured(1, LAYER, 9000)],
            Treatment(compile_threads=1),
            id="what helped stays: confirmations run as it did",
        ),
        pytest.param([cut(*faults(K.HOST_OOM, 0))], Treatment(), id="what the budget ended says nothing"),
    ],
)
def test_treatment(attempts, treated):
    assert treatment(attempts) == treated


def test_the_search_goes_on_after_a_compile_that_the_budget_cut_short():
    ended = cut(failed(1, LAYER, K.COMPILE_TIMEOUT, seconds=190))
    records = [measured(0, EAGER, 9000, seconds=10), ended]
    step = next_step(spec(seconds=300), facts(), records, seconds_used=200)
    assert isinstance(step, Measure) and step.config != LAYER
    more = next_step(spec(seconds=3000), facts(), records, seconds_used=200)
    assert isinstance(more, Measure) and more.config == LAYER


@pytest.mark.parametrize(
    ("kind", "before", "state"),
    [
        pytest.param(K.OOM, [], State.PRUNED, id="the config's fault"),
        pytest.param(K.HOST_OOM, [], State.PRUNED, id="killed"),
        pytest.param(K.UNKNOWN, [], State.PRUNED, id="nobody knows"),
        pytest.param(K.INFRASTRUCTURE, [], State.FAIL, id="the machine's fault"),
        pytest.param(K.INFRASTRUCTURE, faults(K.INFRASTRUCTURE, 0), State.FAIL, id="however often"),
        pytest.param(K.GPU_FAULT, [], State.FAIL, id="a fault of the GPU"),
        pytest.param(K.GPU_FAULT, faults(K.INFRASTRUCTURE, 0), State.FAIL, id="after another fault"),
        pytest.param(K.GPU_FAULT, faults(K.GPU_FAULT, 0), State.PRUNED, id="twice: the config's"),
    ],
)
def test_who_is_blamed(kind, before, state):
    assert state_after(failed(1, LAYER, kind).failure, before) is state


@pytest.mark.parametrize(
    ("records", "spare"),
    [
        pytest.param(faults(K.INFRASTRUCTURE, 0), False, id="another fault of the machine"),
        pytest.param([named(*faults(K.INFRASTRUCTURE, 0), CACHE_FOLDER), measured(1, EAGER, 9000)], True, id="broken"),
    ],
)
def test_a_broken_cache_folder_is_left_for_the_spare_one(records, spare):
    assert needs_spare_cache(records) is spare


def each(kind, *settings, **fields):
    return [failed(number, one, kind, **fields) for number, one in enumerate(settings)]


SIZES = [config(scope="layer", micro_batch=2**n) for n in range(12)]
CHECKPOINTED = [config(scope="layer", micro_batch=2**n, gradient_checkpointing=True) for n in range(8)]


def mixed(successes):
    """Twenty configs, of which so many were measured: the last and every fifth before it."""
    good = {5 * number for number in range(successes)}
    return [
        measured(number, one, 9000) if 19 - number in good else failed(number, one, K.OOM)
        for number, one in enumerate([*SIZES, *CHECKPOINTED])
    ]


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        pytest.param(each(K.INFRASTRUCTURE, *SIZES[:2]), None, id="two faults"),
        pytest.param(each(K.INFRASTRUCTURE, *SIZES[:3]), "failed on this machine", id="three faults"),
        pytest.param(each(K.INFRASTRUCTURE, EAGER, EAGER, EAGER), "failed on this machine", id="of one config"),
        pytest.param(
            [*each(K.INFRASTRUCTURE, *SIZES[:3]), running(3, EAGER)], "failed on this machine", id="another slice runs"
        ),
        pytest.param([*each(K.INFRASTRUCTURE, *SIZES[:3]), measured(3, EAGER, 9000)], None, id="it works again"),
        pytest.param(
            [failed(0, LAYER, K.INFRASTRUCTURE), failed(1, EAGER, K.OOM), *faults(K.INFRASTRUCTURE, 2, 3)],
            None,
            id="not in a row",
        ),
        pytest.param([stopped(n, EAGER, "lost") for n in range(3)], None, id="lost slices are no faults"),
        pytest.param(each(K.OOM, *SIZES[:3]), None, id="the configs' own failures"),
        pytest.param(
            [
                *faults(K.GPU_FAULT, 0),
                *faults(K.GPU_FAULT, 1, state=State.PRUNED),
                failed(2, GRAPHS, K.GPU_FAULT),
            ],
            None,
            id="a GPU fault and its repeat count once",
        ),
        pytest.param(each(K.GPU_FAULT, LAYER, GRAPHS, EAGER), "failed on this machine", id="a broken GPU"),
        pytest.param(each(K.UNKNOWN, *SIZES[:2]), None, id="two that nobody knows"),
        pytest.param(each(K.UNKNOWN, *SIZES[:3]), "nobody knows why", id="three that nobody knows"),
        pytest.param(each(K.HOST_OOM, EAGER, EAGER, *SIZES[:1]), None, id="two configs killed, one of them twice"),
        pytest.param(
            each(K.HOST_OOM, EAGER, *SIZES[:2]), "the host's memory", id="three configs killed from the start"
        ),
        pytest.param(
            [
                measured(9, EAGER, 9000),
                *(one.model_copy(update={"number": 10 + n}) for n, one in enumerate(each(K.HOST_OOM, *SIZES))),
            ],
            None,
            id="compiled configs are killed, eager ones ran",
        ),
        pytest.param(
            [
                measured(0, EAGER, 9000),
                *faults(K.HOST_OOM, 1),
                failed(2, GRAPHS, K.HOST_OOM),
                failed(3, EAGER, K.HOST_OOM),
            ],
            "the host's memory",
            id="what ran before is killed now",
        ),
        pytest.param(
            [
                measured(0, EAGER, 9000),
                failed(1, config(micro_batch=8), K.HOST_OOM),
                failed(2, config(micro_batch=8, scope="layer"), K.HOST_OOM),
                failed(3, config(micro_batch=8, scope="model"), K.HOST_OOM),
            ],
            None,
            id="batches larger than any that ran",
        ),
        pytest.param([named(*faults(K.INFRASTRUCTURE, 0), CACHE_FOLDER)], None, id="a broken cache folder"),
        pytest.param(
            [named(*faults(K.INFRASTRUCTURE, 0), SPARE_CACHE_FOLDER)], "can be kept nowhere", id="the spare one too"
        ),
    ],
)
def test_the_end_of_the_study(records, reason):
    found = abort_reason(records)
    assert (found is None) if reason is None else (found is not None and reason in found and "happened" in found)


@pytest.mark.parametrize(
    ("records", "brakes"),
    [
        pytest.param(each(K.OOM, *SIZES[:7]), False, id="seven failures are few"),
        pytest.param(each(K.OOM, *SIZES[:8]), True, id="eight and no success"),
        pytest.param([measured(9, EAGER, 9000), *each(K.OOM, *SIZES[:8])], False, id="the last of them a success"),
        pytest.param(
            [measured(0, EAGER, 9000), *(failed(1 + n, one, K.OOM) for n, one in enumerate(SIZES[:9]))],
            False,
            id="a success among the last ten",
        ),
        pytest.param(
            [measured(0, EAGER, 9000), *(failed(1 + n, one, K.OOM) for n, one in enumerate(SIZES[:10]))],
            True,
            id="ten failures after a success",
        ),
        pytest.param(
            [failed(n, one, K.HANG) for n, one in enumerate([*SIZES[:4], *SIZES[:4]])],
            False,
            id="a repeat is no other config",
        ),
        pytest.param([stopped(n, one, "budget") for n, one in enumerate(SIZES)], False, id="ended by the budget"),
        pytest.param(
            [cut(record) for record in each(K.COMPILE_TIMEOUT, *SIZES[:9])], False, id="cut short by the budget"
        ),
        pytest.param(each(K.OOM, *SIZES[:9], role=Role.CONFIRM), False, id="confirmations are no search"),
        pytest.param([*each(K.OOM, *SIZES[:8]), running(8, EAGER)], True, id="another one runs"),
        pytest.param(mixed(2), True, id="two of twenty succeed"),
        pytest.param(mixed(3), False, id="three of twenty succeed"),
    ],
)
def test_the_brake(records, brakes):
    assert (brake_reason(records) is not None) is brakes


def test_the_brake_names_the_commonest_failure():
    records = [failed(n, one, K.OOM if n % 3 else K.COMPILE_ERROR) for n, one in enumerate(SIZES[:9])]
    assert brake_reason(records) == "the last 9 configs all failed, 6 of them with oom: oom happened"
