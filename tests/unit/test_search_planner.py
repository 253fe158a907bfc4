"""The next step, phase by phase."""

from __future__ import annotations

import pytest

from autocompile.records import FailureKind, State
from autocompile.search import (
    Ask,
    Finished,
    Measure,
    Wait,
    admissible,
    candidates,
    compile_deadline,
    next_step,
    verdict,
)
from autocompile.search.canonical import is_eager, key, known_to_fail
from autocompile.search.finalists import lineup
from autocompile.search.history import history_of
from autocompile.space import load_space, parse_space
from autocompile.spec import FULL_DEPTH, Grid, Paired, Role, Search, gradient_accumulation
from tests.unit.search_cases import (
    CPU,
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
    running,
    spec,
    stopped,
)

K = FailureKind
BASELINE = measured(0, EAGER, 8000, role=Role.BASELINE)
EAGER_2, EAGER_8, EAGER_16 = (config(micro_batch=size) for size in (2, 8, 16))
LAYER_2, LAYER_8, LAYER_16 = (config(scope="layer", micro_batch=size) for size in (2, 8, 16))
GRAPHS_8 = config(scope="layer", mode="reduce-overhead", micro_batch=8)
CHECKPOINTED = config(gradient_checkpointing=True)
KNOWN_GOOD = [  # micro-batches do not gain, so all that is known to be good was measured
    BASELINE,
    measured(1, LAYER, 14000),
    measured(2, GRAPHS, 13000),
    measured(3, LAYER_8, 14100),
    measured(4, EAGER_8, 8050, role=Role.BASELINE),
    measured(5, EAGER_2, 7000, role=Role.BASELINE),
    measured(6, LAYER_2, 12000),
]


def baseline(settings):
    return Measure(settings, Role.BASELINE, FULL_DEPTH)


def search(settings):
    return Measure(settings, Role.SEARCH, FULL_DEPTH)


def confirm(settings):
    return Measure(settings, Role.CONFIRM, FULL_DEPTH)


def sustain(settings):
    return Measure(settings, Role.PROBE, FULL_DEPTH)


def out_of_memory(*sizes, **knobs):
    return [failed(n, config(micro_batch=size, **knobs), K.OOM, role=Role.BASELINE) for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("study", "records", "step"),
    [
        pytest.param(spec(), [], baseline(EAGER), id="nothing measured"),
        pytest.param(spec(), [running(0, EAGER, role=Role.BASELINE)], Wait(), id="the baseline runs"),
        pytest.param(spec(pinned={"scope": "layer"}), [], baseline(EAGER), id="eager first though the scope is pinned"),
        pytest.param(spec(pinned={"micro_batch": 16}), [], baseline(EAGER_16), id="at the pinned micro-batch"),
        pytest.param(spec(seconds=1), [], baseline(EAGER), id="the baseline starts in the smallest budget"),
        pytest.param(spec(), out_of_memory(4), baseline(EAGER_2), id="out of memory: half the micro-batch"),
        pytest.param(spec(), out_of_memory(4, 2, 1), baseline(CHECKPOINTED), id="out of memory at 1: checkpointing"),
        pytest.param(
            spec(pinned={"micro_batch": 4}),
            out_of_memory(4),
            baseline(CHECKPOINTED),
            id="pinned: checkpointing at once",
        ),
        pytest.param(
            spec(pinned={"micro_batch": 4}),
            [*out_of_memory(4), failed(1, CHECKPOINTED, K.OOM, role=Role.BASELINE)],
            search(config(scope="layer", gradient_checkpointing=True)),
            id="no eager config fits: compile may",
        ),
        pytest.param(
            spec(), [failed(0, EAGER, K.HOST_OOM, role=Role.BASELINE)], baseline(EAGER), id="host memory: once more"
        ),
        pytest.param(
            spec(),
            [failed(n, EAGER, K.HOST_OOM, role=Role.BASELINE) for n in (0, 1)],
            baseline(EAGER_2),
            id="host memory twice: half the micro-batch",
        ),
        pytest.param(
            spec(),
            [failed(0, EAGER, K.GPU_FAULT, role=Role.BASELINE)],
            baseline(EAGER),
            id="a broken machine: once more",
        ),
        pytest.param(
            spec(), [stopped(0, EAGER, "lost", role=Role.BASELINE)], baseline(EAGER), id="lost with its coordinator"
        ),
        pytest.param(
            spec(),
            [stopped(n, EAGER, "interrupted", role=Role.BASELINE) for n in range(3)],
            baseline(EAGER),
            id="interrupted ever again",
        ),
        pytest.param(
            spec(), [*out_of_memory(4), running(1, EAGER_2, role=Role.BASELINE)], Wait(), id="the smaller baseline runs"
        ),
    ],
)
def test_eager_is_measured_before_all_else(study, records, step):
    assert next_step(study, facts(), records, seconds_used=0) == step


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([failed(0, EAGER, K.WORKLOAD_ERROR, role=Role.BASELINE)], id="the workload itself is broken"),
        pytest.param([failed(n, EAGER, K.HANG, role=Role.BASELINE) for n in (0, 1)], id="eager hangs, twice"),
    ],
)
def test_a_study_whose_eager_training_does_not_work_ends(records):
    step = next_step(spec(), facts(), records, seconds_used=0)
    assert isinstance(step, Finished) and step.verdict.result == "none"


@pytest.mark.parametrize(
    ("known", "study", "records", "step"),
    [
        pytest.param(facts(), spec(), [BASELINE], search(LAYER), id="layers first"),
        pytest.param(
            facts(), spec(), [BASELINE, running(1, LAYER)], search(GRAPHS), id="CUDA graphs in the second slot"
        ),
        pytest.param(
            facts(CPU), spec(), [BASELINE, measured(1, LAYER, 14000)], search(LAYER_8), id="no graphs on a CPU"
        ),
        pytest.param(
            facts(),
            spec(workload={"global_batch": 32}),
            [BASELINE, measured(1, LAYER, 14000)],
            search(GRAPHS),
            id="graphs with accumulation too: wrong gradients are found out",
        ),
        pytest.param(facts(), spec(), KNOWN_GOOD[:3], search(LAYER_8), id="a larger batch of the better one"),
        pytest.param(
            facts(),
            spec(),
            [BASELINE, measured(1, LAYER, 9000), measured(2, GRAPHS, 13000)],
            search(GRAPHS_8),
            id="CUDA graphs are the better one",
        ),
        pytest.param(facts(), spec(), KNOWN_GOOD[:4], baseline(EAGER_8), id="eager with the batch of the best"),
        pytest.param(
            facts(),
            spec(),
            [*KNOWN_GOOD[:4], measured(4, EAGER_8, 8050)],
            search(LAYER_2),
            id="no gain upwards: a smaller batch",
        ),
        pytest.param(
            facts(),
            spec(),
            [*KNOWN_GOOD[:3], measured(3, LAYER_8, 15000), measured(4, EAGER_8, 9000)],
            search(LAYER_16),
            id="both go on while they gain",
        ),
        pytest.param(
            facts(),
            spec(),
            [
                *KNOWN_GOOD[:3],
                measured(3, LAYER_8, 15000),
                measured(4, EAGER_8, 9000),
                measured(5, LAYER_16, 15100),
            ],
            baseline(EAGER_16),
            id="eager goes on alone: its own best must be known",
        ),
        pytest.param(
            facts(),
            spec(),
            [*KNOWN_GOOD[:3], failed(3, LAYER_8, K.OOM), measured(4, EAGER_8, 8050), measured(5, EAGER_2, 7000)],
            search(LAYER_2),
            id="no memory upwards: a smaller batch",
        ),
        pytest.param(
            facts(),
            spec(),
            [*KNOWN_GOOD[:3], measured(3, LAYER_8, 20000, reserved_gib=135), measured(4, EAGER_8, 8050)],
            search(LAYER_2),
            id="tight memory is the end of the climb",
        ),
        pytest.param(
            facts(),
            spec(pinned={"scope": "attention"}),
            [BASELINE],
            search(config(scope="attention")),
            id="the pinned scope where layers are not in the space",
        ),
        pytest.param(
            facts(),
            spec(),
            [BASELINE, failed(1, LAYER, K.INFRASTRUCTURE)],
            search(LAYER),
            id="a machine fault is measured again",
        ),
        pytest.param(
            facts(),
            spec(),
            [BASELINE, failed(1, LAYER, K.INFRASTRUCTURE), running(2, LAYER)],
            search(GRAPHS),
            id="the repeat runs",
        ),
        pytest.param(
            facts(),
            spec(),
            [BASELINE, failed(1, LAYER, K.INFRASTRUCTURE), failed(2, LAYER, K.GPU_FAULT)],
            search(GRAPHS),
            id="only once",
        ),
        pytest.param(
            facts(),
            spec(),
            [BASELINE, stopped(1, LAYER, "lost"), failed(2, LAYER, K.OOM)],
            search(GRAPHS),
            id="decided",
        ),
    ],
)
def test_what_is_known_to_be_good_comes_before_the_sampler(known, study, records, step):
    assert next_step(study, known, records, seconds_used=0) == step


@pytest.mark.parametrize(
    ("records", "step"),
    [
        pytest.param([BASELINE, running(1, LAYER), running(2, GRAPHS)], Wait(), id="larger eager batches"),
        pytest.param(
            [BASELINE, running(1, LAYER), measured(2, GRAPHS, 13000)], Wait(), id="also when one of two ended"
        ),
        pytest.param([*KNOWN_GOOD[:3], running(3, LAYER_8)], Wait(), id="eager with the batch of the best"),
        pytest.param(KNOWN_GOOD[:4], baseline(EAGER_8), id="it has its turn when that ended"),
        pytest.param(
            [*KNOWN_GOOD[:4], failed(4, EAGER_8, K.INFRASTRUCTURE, role=Role.BASELINE), running(5, LAYER_16)],
            Wait(),
            id="a repeat",
        ),
        pytest.param([*KNOWN_GOOD, running(7, LAYER_16)], Wait(), id="plain compile beside another compile"),
        pytest.param([*KNOWN_GOOD, running(7, EAGER_16)], baseline(MODEL), id="not beside an eager search"),
    ],
)
def test_a_baseline_waits_for_compiled_slices_and_nothing_passes_it(records, step):
    assert next_step(spec(), facts(), records, seconds_used=0) == step


@pytest.mark.parametrize(
    ("records", "step"),
    [
        pytest.param([*KNOWN_GOOD[:4], running(4, EAGER_8, role=Role.BASELINE)], Wait(), id="a larger batch"),
        pytest.param([*KNOWN_GOOD, running(7, MODEL, role=Role.BASELINE)], Wait(), id="the sampler"),
        pytest.param([BASELINE, running(1, EAGER_8)], search(LAYER), id="not for eager training that is no baseline"),
        pytest.param(
            [BASELINE, stopped(1, EAGER_8, "lost", role=Role.BASELINE)],
            baseline(EAGER_8),
            id="nor for one that is gone",
        ),
    ],
)
def test_a_compiled_slice_waits_for_baselines(records, step):
    assert next_step(spec(), facts(), records, seconds_used=0) == step


def test_with_sequences_of_many_lengths_each_padding_is_tried_compiled_and_eager():
    study = spec(space=load_space("default"), workload={"lengths": "uniform:16-512"})
    tried = []
    records = list(KNOWN_GOOD)
    while isinstance(step := next_step(study, facts(), records, seconds_used=0), Measure) and len(tried) < 9:
        if step.config["padding"] == "longest":
            break
        tried.append((step.config["scope"], step.config["padding"], step.role))
        records.append(measured(len(records), step.config, 9000, role=step.role))
    assert tried == [
        ("layer", "fixed", Role.SEARCH),
        ("none", "fixed", Role.BASELINE),
        ("layer", "bucket:64", Role.SEARCH),
        ("none", "bucket:64", Role.BASELINE),
    ]


@pytest.mark.parametrize(("seconds_used", "step"), [(210, search(LAYER_8)), (220, baseline(EAGER_8))])
def test_no_larger_compiled_batch_without_time_for_its_eager_one(seconds_used, step):
    """Else the winner's batch would be compared with a smaller one of eager."""
    assert next_step(spec(seconds=600), facts(), KNOWN_GOOD[:3], seconds_used) == step


def test_no_smaller_batch_where_a_larger_one_gained():
    records = [*KNOWN_GOOD[:3], measured(3, LAYER_8, 15000), failed(4, LAYER_16, K.OOM)]
    records += [measured(5, EAGER_8, 8050), measured(6, EAGER_2, 7000)]
    assert next_step(spec(), facts(), records, seconds_used=0) not in (search(LAYER_2), search(LAYER_16))


def test_the_climb_down_ends_with_the_first_batch_that_fits():
    records = [BASELINE, failed(1, LAYER, K.OOM), failed(2, GRAPHS, K.OOM), *KNOWN_GOOD[4:6]]
    assert next_step(spec(), facts(), records, 0) == search(LAYER_2)
    assert next_step(spec(), facts(), [*records, measured(6, LAYER_2, 9000)], 0) == baseline(MODEL)


@pytest.mark.parametrize(
    ("study", "seconds_used", "step"),
    [
        pytest.param(spec(), 0, baseline(MODEL), id="no limit"),
        pytest.param(spec(seconds=1800), 200, baseline(MODEL), id="its compile is less than a third of what is left"),
        pytest.param(spec(seconds=540), 230, Ask(FULL_DEPTH), id="its compile is more"),
        pytest.param(spec(pinned={"scope": "layer"}), 0, Ask(FULL_DEPTH), id="the scope is pinned"),
        pytest.param(spec(space=SMALL_SPACE), 0, baseline(MODEL), id="a baseline, so also outside the space"),
    ],
)
def test_plain_compile_is_a_baseline_as_soon_as_the_budget_holds_it(study, seconds_used, step):
    assert next_step(study, facts(), KNOWN_GOOD, seconds_used) == step


DONE = [*KNOWN_GOOD, measured(7, MODEL, 14000, seconds=150, cold_seconds=117, role=Role.BASELINE)]
LAYERS_ONLY = spec(space=SMALL_SPACE, seconds=540)  # its whole space is in DONE, so what follows is the confirmation


@pytest.mark.parametrize(
    ("study", "records", "step"),
    [
        pytest.param(spec(), DONE, Ask(FULL_DEPTH), id="no limit"),
        pytest.param(spec(seconds=2000), DONE, Ask(FULL_DEPTH), id="budget left"),
        pytest.param(spec(trials=9), DONE, Ask(FULL_DEPTH), id="a trial left"),
        pytest.param(spec(trials=9), [*DONE, running(8, LAYER_16)], Wait(), id="the last trial runs"),
        pytest.param(spec(trials=8), DONE, confirm(LAYER_8), id="no trial left"),
        pytest.param(
            spec(trials=9), [*DONE, failed(8, LAYER_16, K.GPU_FAULT)], search(LAYER_16), id="faults do not count"
        ),
        pytest.param(spec(trials=9), [*DONE, failed(8, LAYER_16, K.OOM)], confirm(LAYER_8), id="failed configs count"),
        pytest.param(
            spec(trials=9), [*DONE, failed(8, LAYER_16, K.HOST_OOM)], search(LAYER_16), id="a repeat is no other trial"
        ),
        pytest.param(spec(seconds=700), DONE, Ask(FULL_DEPTH), id="a slice and the round fit"),
        pytest.param(spec(seconds=450), DONE, confirm(LAYER_8), id="only the round fits"),
        pytest.param(LAYERS_ONLY, DONE, confirm(LAYER_8), id="nothing left in the space"),
    ],
)
def test_the_sampler_is_asked_until_its_share_is_spent(study, records, step):
    assert next_step(study, facts(), records, seconds_used=300 if study.budget.seconds else 0) == step


SEARCHED = [
    BASELINE,
    measured(1, LAYER, 14000),
    measured(2, LAYER_8, 14100),
    measured(3, EAGER_8, 8050, role=Role.BASELINE),
    measured(4, LAYER_2, 5000),
    measured(5, EAGER_2, 7000, role=Role.BASELINE),
    measured(6, MODEL, 14000, role=Role.BASELINE),
]


FIRST = [confirmed(10 + n, settings, 9000) for n, settings in enumerate([LAYER_8, EAGER_8, LAYER, EAGER])]


@pytest.mark.parametrize(
    ("records", "step"),
    [
        pytest.param(SEARCHED, confirm(LAYER_8), id="the best first"),
        pytest.param([*SEARCHED, *FIRST[:1]], confirm(EAGER_8), id="then eager at its own best batch"),
        pytest.param([*SEARCHED, *FIRST[:2]], confirm(LAYER), id="then the second, the first without compile is there"),
        pytest.param([*SEARCHED, *FIRST[:3]], confirm(EAGER), id="then the second without compile"),
        pytest.param([*SEARCHED, running(10, LAYER_8, role=Role.CONFIRM)], Wait(), id="one at a time, in turns"),
        pytest.param([*SEARCHED, running(10, LAYER_2)], Wait(), id="not beside a search slice"),
        pytest.param(
            [*SEARCHED, stopped(10, LAYER_8, "lost", role=Role.CONFIRM)], confirm(LAYER_8), id="a lost one again"
        ),
        pytest.param(
            [*SEARCHED, failed(10, LAYER_8, K.OOM, role=Role.CONFIRM)],
            confirm(LAYER),
            id="a finalist that fails here is none",
        ),
        pytest.param(
            [*SEARCHED[:2], measured(2, LAYER_8, 11000), *SEARCHED[3:], FIRST[2], FIRST[1]],
            confirm(EAGER),
            id="what is hopelessly slower is not confirmed",
        ),
    ],
)
def test_the_first_block_of_confirmations(records, step):
    assert next_step(spec(space=SMALL_SPACE), facts(), records, seconds_used=0) == step


ROUNDS = confirmations(10, (LAYER_8, [14100.0] * 6), (EAGER_8, [8000.0] * 6))
PROBE = measured(22, LAYER_8, 13900, role=Role.PROBE)


@pytest.mark.parametrize(
    ("records", "step"),
    [
        pytest.param([*SEARCHED, *ROUNDS], sustain(LAYER_8), id="enough rounds"),
        pytest.param([*SEARCHED, *ROUNDS, running(22, LAYER_8, role=Role.PROBE)], Wait(), id="it runs"),
        pytest.param(
            [*SEARCHED, *ROUNDS, stopped(22, LAYER_8, "lost", role=Role.PROBE)], sustain(LAYER_8), id="it was lost"
        ),
        pytest.param(
            [*SEARCHED, *ROUNDS, failed(22, LAYER_8, K.GPU_FAULT, role=Role.PROBE)],
            sustain(LAYER_8),
            id="the machine failed",
        ),
        pytest.param(
            [*SEARCHED, *confirmations(10, (LAYER_8, [7000.0] * 6), (EAGER_8, [8000.0] * 6))],
            sustain(EAGER_8),
            id="eager won",
        ),
    ],
)
def test_the_winner_has_a_sustained_minute(records, step):
    assert next_step(spec(space=SMALL_SPACE, seconds=600), facts(), records, seconds_used=400) == step


@pytest.mark.parametrize(
    ("records", "seconds_used"),
    [
        pytest.param([*SEARCHED, *ROUNDS, PROBE], 0, id="all is done"),
        pytest.param([*SEARCHED, *ROUNDS], 511, id="the sustained minute does not fit"),
        pytest.param([*SEARCHED, *ROUNDS[:4]], 541, id="another block does not fit"),
        pytest.param([*SEARCHED, *ROUNDS[:5]], 571, id="the rest of a block does not fit"),
        pytest.param(SEARCHED, 490, id="two blocks do not fit"),
        pytest.param([*SEARCHED, *ROUNDS[:1]], 510, id="the second does not"),
        pytest.param([BASELINE], 600, id="the budget is spent"),
        pytest.param([], 601, id="the budget was spent before anything was measured"),
    ],
)
def test_finished(records, seconds_used):
    step = next_step(spec(space=SMALL_SPACE, seconds=600), facts(), records, seconds_used)
    assert isinstance(step, Finished)


def test_a_cpu_has_no_sustained_minute():
    assert isinstance(next_step(spec(space=SMALL_SPACE), facts(CPU), [*SEARCHED, *ROUNDS], 0), Finished)


def test_a_search_in_which_everything_fails_ends_with_what_is_known():
    hopeless = [c for c in candidates(spec(), facts()) if c["scope"] == "attention"][:10]
    records = [*DONE, *(failed(8 + n, c, K.NUMERICS_MISMATCH) for n, c in enumerate(hopeless))]
    assert next_step(spec(), facts(), records[:-1], 0) == Ask(FULL_DEPTH)
    assert next_step(spec(), facts(), records, 0) == confirm(LAYER_8)


def test_a_lone_eager_measurement_is_not_confirmed():
    step = next_step(spec(trials=1), facts(), [BASELINE], seconds_used=10)
    assert isinstance(step, Finished) and not step.verdict.confirmed


@pytest.mark.parametrize(
    ("seconds_used", "allowed"),
    [
        pytest.param(0, {"layer", "none", "attention", "model"}, id="much time: all scopes"),
        pytest.param(850, {"layer", "none", "attention"}, id="less time: not what compiles longest"),
        pytest.param(880, set(), id="the other half is for the confirmations"),
    ],
)
def test_admissible_is_what_the_budget_holds(seconds_used, allowed):
    study = spec(seconds=1800)
    may = admissible(study, facts(), DONE, seconds_used)
    assert {c["scope"] for c in candidates(study, facts()) if may(c)} == allowed


def test_a_long_compile_may_start_when_nothing_cheaper_is_untried():
    pinned = {"scope": "layer", "mode": "max-autotune"}
    records = [BASELINE, measured(1, config(**pinned), 14000, seconds=160, cold_seconds=130)]
    heavy = config(**pinned, fullgraph=True)  # compiles for more than a third of what is left before the confirmations
    assert admissible(spec(seconds=560, pinned=pinned), facts(), records, 30)(heavy)
    assert not admissible(spec(seconds=560, pinned={"scope": "layer"}), facts(), records, 30)(heavy)


@pytest.mark.parametrize(
    ("settings", "records"),
    [
        pytest.param(LAYER, DONE, id="tried"),
        pytest.param(LAYER_16, [*DONE, running(8, LAYER_16)], id="running in another slot"),
        pytest.param(config(scope="layer", cache_size_limit=64), DONE, id="not in the space"),
        pytest.param(LAYER_16, [*DONE, failed(8, LAYER_8, K.OOM)], id="ruled out by a failure"),
        pytest.param(
            config(scope="layer", mode="reduce-overhead", gradient_checkpointing=True),
            DONE,
            id="known to fail: at last",
        ),
    ],
)
def test_not_admissible(settings, records):
    assert not admissible(spec(), facts(), records, 0)(settings)


def test_pairs_known_to_fail_get_one_try_when_all_else_is_tried():
    study = spec(pinned={"scope": "layer", "gradient_checkpointing": True, "sdpa": "auto", "fullgraph": False})
    usual = [c for c in candidates(study, facts()) if known_to_fail(c) is None]
    pairs = [c for c in candidates(study, facts()) if known_to_fail(c)]
    records = [measured(n, c, 9000) for n, c in enumerate([config(gradient_checkpointing=True), *usual])]
    assert not any(map(admissible(study, facts(), records[:-1], 0), pairs))
    assert all(map(admissible(study, facts(), records, 0), pairs))
    beside = [*records, running(90, pairs[0])]
    assert not any(map(admissible(study, facts(), beside, 0), pairs))
    after = [*records, failed(90, pairs[0], K.COMPILE_ERROR)]
    assert not any(map(admissible(study, facts(), after, 0), pairs))


RIVAL, EAGER_AGAIN = 30 - 13 * 2 / 3 + 8, 30 + 8  # seconds of their confirmations


@pytest.mark.parametrize(
    ("study", "records", "seconds"),
    [
        pytest.param(spec(), DONE, 900, id="no budget"),
        pytest.param(spec(seconds=7200), DONE, 900, id="a long budget"),
        pytest.param(spec(seconds=400), [BASELINE], 300, id="nothing to confirm yet"),
        pytest.param(
            spec(seconds=1900),
            KNOWN_GOOD,
            1800 - (6 * (2 * RIVAL + 2 * EAGER_AGAIN) + RIVAL + 60 + 5),
            id="less six blocks of four and the sustained minute",
        ),
        pytest.param(spec(seconds=420), KNOWN_GOOD, 320 - (210 + 5), id="less half the budget, if it holds no more"),
        pytest.param(
            spec(seconds=330), KNOWN_GOOD, 230 - (3 * (RIVAL + EAGER_AGAIN) + 5), id="less three blocks of the pair"
        ),
        pytest.param(
            spec(seconds=330),
            [*KNOWN_GOOD, *(confirmed(7 + n, c, 14000, seconds=5) for n, c in enumerate([LAYER_8, LAYER, EAGER_8]))],
            230 - (3 * (RIVAL + EAGER_AGAIN) + 5),
            id="quick confirmations give no time back to the search",
        ),
        pytest.param(spec(seconds=260), KNOWN_GOOD, 0, id="only the time of the confirmations is left"),
    ],
)
def test_compile_deadline(study, records, seconds):
    assert compile_deadline(study, facts(), records, 100, config(sdpa="math")) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("records", "settings"),
    [
        pytest.param([BASELINE, measured(1, LAYER, 14000)], GRAPHS, id="settings that usually win"),
        pytest.param([*KNOWN_GOOD[:3], measured(3, LAYER_8, 15000)], EAGER_8, id="eager with the batch of the best"),
    ],
)
def test_what_a_verdict_owes_is_measured_as_long_as_two_blocks_remain(records, settings):
    study = spec(seconds=330)
    least = 2 * (RIVAL + EAGER_AGAIN) + 5
    assert compile_deadline(study, facts(), records, 100, settings) == pytest.approx(230 - least)
    assert compile_deadline(study, facts(), records, 100, config(sdpa="math")) < 230 - least
    started = baseline(settings) if is_eager(settings) else search(settings)
    assert next_step(study, facts(), records, 330 - least - 75) == started
    assert next_step(study, facts(), records, 330 - least) != started


WAYS = parse_space(
    """
format: 1
parameters:
  scope: {choices: [none, layer], default: none, why: tests}
  micro_batch: {low: 1, high: 8, scale: log2, default: 8, why: tests}
  parallel: {choices: [ddp, zero3, none], default: ddp, why: tests}
  ddp.bucket_cap_mb: {choices: [25, 50], default: 25, when: {parallel: [ddp]}, why: tests}
""",
    source="tests",
)


def by_way(**fields):
    return spec(space=WAYS, workload={"parallel": "auto", "gpus_per_trial": 2, "global_batch": 8}, **fields)


def way(parallel, **knobs):
    return config(**{"micro_batch": 4, "parallel": parallel, **knobs})


def test_ways_to_train_have_one_global_batch_and_their_own_knobs():
    found = candidates(by_way(), facts())
    assert {c["micro_batch"] for c in found if c["parallel"] == "none"} == {1, 2, 4, 8}
    assert {c["micro_batch"] for c in found if c["parallel"] != "none"} == {1, 2, 4}
    assert {c["ddp.bucket_cap_mb"] for c in found if c["parallel"] != "ddp"} == {25}
    assert {gradient_accumulation(by_way().workload, c) * c["micro_batch"] for c in found} == {4, 8}


def test_every_way_to_train_is_tried_eager_and_compiled():
    records = []
    while isinstance(step := next_step(by_way(), facts(), records, 0), Measure) and step.role is not Role.CONFIRM:
        records.append(measured(len(records), step.config, 9000, role=step.role))
    assert records[0].config == way("ddp")
    tried = {(r.config["parallel"], r.config["scope"]) for r in records}
    assert tried >= {(parallel, scope) for parallel in ("ddp", "zero3", "none") for scope in ("none", "layer")}


def test_where_memory_does_not_hold_one_way_the_next_is_tried():
    sizes = [way("ddp", micro_batch=size) for size in (4, 2, 1)]
    records = [failed(n, c, K.OOM, role=Role.BASELINE) for n, c in enumerate(sizes)]
    assert next_step(by_way(), facts(), records, 0) == baseline(way("zero3"))


def test_grid_measures_every_config_once():
    study = spec(space=SMALL_SPACE, plan=Grid())
    records = []
    while isinstance(step := next_step(study, facts(), records, 0), Measure):
        assert step.role is Role.SEARCH
        records.append(measured(len(records), step.config, 9000))
    assert isinstance(step, Finished)
    assert [r.config for r in records] == list(candidates(study, facts()))


@pytest.mark.parametrize(
    ("records", "step"),
    [
        pytest.param([], confirm(LAYER), id="the first"),
        pytest.param([running(0, LAYER, role=Role.CONFIRM)], Wait(), id="in turns"),
        pytest.param([measured(0, LAYER, 14000, role=Role.CONFIRM)], confirm(GRAPHS), id="the second"),
        pytest.param([failed(0, LAYER, K.OOM, role=Role.CONFIRM)], confirm(GRAPHS), id="also after a failure"),
        pytest.param([failed(0, LAYER, K.GPU_FAULT, role=Role.CONFIRM)], confirm(LAYER), id="a fault is repeated"),
    ],
)
def test_paired_confirms_its_configs_and_nothing_else(records, step):
    assert next_step(spec(plan=Paired(configs=(LAYER, GRAPHS))), facts(), records, 0) == step


def test_paired_ends_when_its_rounds_do():
    study = spec(plan=Paired(configs=(LAYER, GRAPHS)))
    records = confirmations(0, (LAYER, [14000.0] * 6), (GRAPHS, [13000.0] * 6))
    assert next_step(study, facts(), records[:-1], 0) == confirm(GRAPHS)
    step = next_step(study, facts(), records, 0)
    assert isinstance(step, Finished) and step.verdict.rounds == 5


@pytest.mark.parametrize(("plan", "n_started"), [(Search(), 2), (Grid(), 8)])
def test_a_config_is_never_started_twice_beside_itself(plan, n_started):
    records = [BASELINE]
    for number in range(1, 9):
        step = next_step(spec(plan=plan), facts(), records, 0)
        if not isinstance(step, Measure):
            break
        assert step.config not in [r.config for r in records if r.state is State.RUNNING]
        records.append(running(number, step.config, role=step.role))
    assert len(records) == 1 + n_started


@pytest.mark.parametrize(
    ("today", "speed"),
    [
        pytest.param(config(scope="model", cache_size_limit=64), 9000, id="compiled, slower"),
        pytest.param(config(scope="model", cache_size_limit=64), 20000, id="compiled, the fastest"),
        pytest.param(config(sdpa="math"), 7000, id="eager, slower"),
        pytest.param(config(sdpa="math"), 30000, id="eager, the fastest"),
    ],
)
def test_what_the_user_runs_today_is_confirmed_once_a_block_and_compared(today, speed):
    """Whatever the space holds; where nothing beats it, it is kept."""
    study = spec(space=SMALL_SPACE, against=today, seconds=4000)
    speeds = {key(EAGER): 8000, key(today): speed}
    records = []
    while isinstance(step := next_step(study, facts(), records, 25.0 * len(records)), Measure):
        own = speeds.get(key(step.config), 12000 if step.config["scope"] == "layer" else 8000)
        records.append(measured(len(records), step.config, own, role=step.role, seconds=25.0))
    found = verdict(study, facts(), records)
    confirmed_runs = [key(r.config) for r in records if r.role is Role.CONFIRM]
    counts = [confirmed_runs.count(name) for name in dict.fromkeys(confirmed_runs)]
    assert max(counts) - min(counts) <= 1
    best = max(12000, speed)
    assert found.speedup_over_against == pytest.approx(best / speed, rel=0.01)
    assert (found.config == today) is (speed > 12000)


def test_what_the_user_runs_today_is_a_baseline_whatever_the_space_holds():
    today = config(scope="model", cache_size_limit=64, micro_batch=2)
    study = spec(against=today)
    assert next_step(study, facts(), [BASELINE], 0) == baseline(today)
    assert next_step(study, facts(), [BASELINE, measured(1, today, 9000, role=Role.BASELINE)], 0) == search(LAYER)
    beaten = [*KNOWN_GOOD, measured(7, today, 9000, role=Role.BASELINE)]
    assert today in lineup(history_of(study, facts(), tuple(beaten)))


def test_time_that_holds_no_confirmation_is_still_spent_on_what_a_verdict_owes():
    """One slice of 30 s fits, twice the pair does not."""
    study, records = spec(seconds=330), [BASELINE, measured(1, LAYER, 14000)]
    assert next_step(study, facts(), records, 330 - 55) == search(GRAPHS)
    assert isinstance(next_step(study, facts(), records, 330 - 20), Finished)
    confirmed_already = [*records, *confirmations(2, (LAYER, [14000.0] * 2), (EAGER, [8000.0] * 2))]
    assert isinstance(next_step(study, facts(), confirmed_already, 330 - 55), Finished)
