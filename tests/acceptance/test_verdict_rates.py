"""Thousands of simulated studies: how often the verdict is wrong where nothing differs, and right where one does."""

from __future__ import annotations

import random
from collections import Counter
from math import exp

import pytest

from autocompile.records import Result, TrialRecord, Verdict
from autocompile.search import verdict
from autocompile.search.history import History
from autocompile.search.rounds import MOST_ROUNDS, is_settled
from autocompile.space import parse_space
from autocompile.spec import Role, StudySpec
from tests.unit.search_cases import CPU, EAGER, config, facts, measured, spec

FINALISTS = [config(scope=scope) for scope in ("layer", "model", "attention", "mlp", "*.q_proj")]
SPACE = parse_space(
    """
format: 1
parameters:
  scope: {choices: [none, layer, model, attention, mlp, "*.q_proj"], default: none, why: tests}
""",
    source="tests",
)
MACHINE = facts(CPU)


def simulated(seed: int, *, noise: float, gain: float) -> Verdict:
    """A study whose processes differ by ``noise`` (standard deviation of the logarithm), compiled ones faster."""
    pick = random.Random(seed)
    study = spec(space=SPACE, seed=seed)
    records: list[TrialRecord] = []

    def run(settings: dict, role: Role) -> None:
        eager = settings["scope"] == "none"
        speed = 8000 * exp(pick.gauss(0.0 if eager else gain, noise))
        records.append(measured(len(records), settings, speed, role=role, cold_seconds=0.0 if eager else 1.0))

    for settings in (EAGER, *FINALISTS):
        run(settings, Role.SEARCH)
    while not _enough(study, records, noise):
        for settings in (EAGER, *FINALISTS):
            run(settings, Role.CONFIRM)
    return verdict(study, MACHINE, records)


def _enough(study: StudySpec, records: list[TrialRecord], noise: float) -> bool:
    """The rule of the planner, asked only from the round on at which it may say yes: where the noise is large, no
    number of rounds makes the interval narrow."""
    rounds = len(records) // len((EAGER, *FINALISTS)) - 1
    return rounds > (MOST_ROUNDS if noise > 0.02 else 5) and is_settled(History(study, MACHINE, tuple(records)))


def results(n: int, *, noise: float, gain: float = 0.0) -> Counter[Result]:
    found = [simulated(seed, noise=noise, gain=gain) for seed in range(n)]
    assert all(one.confirmed and 5 <= one.rounds <= MOST_ROUNDS for one in found)
    return Counter(one.result for one in found)


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.04])
def test_equal_configs_seldom_win_or_lose(noise):
    found = results(2000, noise=noise)
    wrong = (found[Result.WIN] + found[Result.LOSS]) / found.total()
    assert wrong <= 0.05, dict(found)


def test_a_gain_of_three_percent_is_seen_through_a_noise_of_one():
    found = results(500, noise=0.01, gain=0.03)
    assert found[Result.WIN] / found.total() >= 0.9, dict(found)
