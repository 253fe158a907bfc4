"""What is remembered between questions changes no answer."""

from __future__ import annotations

import random

import pytest

from autocompile.records import FailureKind, State, TrialRecord
from autocompile.sampling import suggest
from autocompile.search import (
    admissible,
    best_config,
    candidates,
    compile_deadline,
    derived,
    next_step,
    of_broken_machine,
    verdict,
)
from autocompile.search.canonical import key
from autocompile.search.per_record import PerRecord
from autocompile.spec import Budget, Facts, StudySpec
from autocompile.values import remembered
from tests.unit.search_cases import EAGER, GRAPHS, LAYER, config, facts, failed, measured, running, spec, stopped

K = FailureKind


def test_the_very_same_values_are_answered_from_memory_and_equal_ones_anew():
    asked = []

    @remembered(2)
    def total(first: tuple[int, ...], second: tuple[int, ...]) -> int:
        asked.append((first, second))
        return sum(first) + sum(second)

    one, two, same = (1, 2), (3,), tuple(iter((1, 2)))
    assert [total(one, two), total(one, two), total(two, one), total(same, two)] == [6, 6, 6, 6]
    assert asked == [(one, two), (two, one), (one, two)]


def test_a_record_is_asked_once_and_another_of_its_number_anew():
    asked = []

    def speed(record: TrialRecord) -> float | None:
        asked.append(record.number)
        return record.value

    speeds = PerRecord(speed)
    first, second = measured(0, EAGER, 1.0), measured(1, LAYER, 2.0)
    assert speeds.of([first, second]) == [1.0, 2.0]
    assert speeds.of([second, first]) == [2.0, 1.0]
    assert speeds.of([measured(0, EAGER, 3.0), second]) == [3.0, 2.0]
    assert asked == [0, 1, 0]


def some_records(seed: int) -> list[TrialRecord]:
    rng = random.Random(seed)
    space = [EAGER, LAYER, GRAPHS, *rng.sample(candidates(spec(), facts()), 25)]
    records: list[TrialRecord] = []
    for number, chosen in enumerate([*space, *rng.sample(space, 6)]):
        kind = rng.choice([K.OOM, K.COMPILE_ERROR, K.GPU_FAULT, K.INFRASTRUCTURE, K.COMPILE_TIMEOUT])
        records.append(
            rng.choice(
                [
                    measured(number, chosen, rng.uniform(100, 200), seconds=rng.uniform(10, 90)),
                    measured(number, chosen, rng.uniform(100, 200), seconds=rng.uniform(10, 90)),
                    failed(number, chosen, kind),
                    stopped(number, chosen, rng.choice(["lost", "budget", "interrupted"])),
                ]
            )
        )
    return records


def answers(study: StudySpec, known: Facts, records: tuple[TrialRecord, ...], used: float) -> list[object]:
    may = admissible(study, known, records, used)
    return [
        next_step(study, known, records, used),
        compile_deadline(study, known, records, used, LAYER),
        compile_deadline(study, known, records, used, config(sdpa="math")),
        [key(config) for config in candidates(study, known) if may(config)],
        suggest(study, known, records=records, admissible=may),
        verdict(study, known, records),
        best_config("study", study, known, records),
        derived(study, known, records),
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("planned", [None, 50_000_000])
def test_a_study_that_grows_is_answered_as_one_that_nobody_has_seen(seed, planned):
    study, known = spec(seconds=3000, planned_tokens=planned), facts()
    records: list[TrialRecord] = []
    for record in some_records(seed):
        open_one = running(record.number, record.config, role=record.role)
        for more in (open_one, record):
            seen = (*records, more)
            fresh = study.model_copy(update={"budget": Budget(seconds=3000)}), known.model_copy()
            assert answers(study, known, seen, 30.0 * len(seen)) == answers(*fresh, seen, 30.0 * len(seen))
        records.append(record)


# A machine that was broken


BROKEN = [failed(number, config, K.INFRASTRUCTURE) for number, config in ((1, LAYER), (2, LAYER), (3, GRAPHS))]


@pytest.mark.parametrize(
    ("records", "void"),
    [
        pytest.param([measured(0, EAGER, 1.0), *BROKEN[:2]], set(), id="two faults are their config's too"),
        pytest.param([measured(0, EAGER, 1.0), *BROKEN], {1, 2, 3}, id="three in a row are the machine's alone"),
        pytest.param([*BROKEN, measured(4, LAYER, 2.0)], {1, 2, 3}, id="also when it was mended"),
        pytest.param([*BROKEN, running(4, LAYER)], {1, 2, 3}, id="also while the next runs"),
        pytest.param(
            [BROKEN[0], BROKEN[1], measured(3, EAGER, 1.0), failed(4, GRAPHS, K.INFRASTRUCTURE)],
            set(),
            id="a success between them",
        ),
        pytest.param(
            [BROKEN[0], stopped(2, GRAPHS, "interrupted"), *(failed(n, GRAPHS, K.INFRASTRUCTURE) for n in (3, 4))],
            {1, 3, 4},
            id="an interruption says nothing",
        ),
        pytest.param(
            [BROKEN[0], BROKEN[1], failed(3, GRAPHS, K.GPU_FAULT, state=State.PRUNED)],
            set(),
            id="a second fault of a config is its own",
        ),
    ],
)
def test_what_a_broken_machine_failed(records, void):
    assert of_broken_machine(records) == void
