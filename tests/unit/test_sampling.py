"""The sampler learns from failures, asks the same after a restart, and never asks for what was tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autocompile.records import (
    Compile,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Measurement,
    Stage,
    State,
    StepSeconds,
    TrialRecord,
)
from autocompile.sampling import suggest
from autocompile.search import Ask, Measure, admissible, next_step
from autocompile.search.canonical import candidates, canonical, key
from autocompile.space import Config, SearchSpace
from autocompile.spec import Budget, Device, Facts, Role, Search, StudySpec, WorkloadSpec

FACTS = Facts(
    devices=(Device(type="cpu", uuid="cpu", name="CPU", memory_bytes=1),), layers=2, parameters=3, environment={}
)
OOM = Failed(failure=Failure(kind=FailureKind.OOM, stage=Stage.WARMUP, message="out of memory"))
BATCH = {"micro_batch": {"low": 1, "high": 64, "scale": "linear", "default": 4, "why": "test"}}
CHECKPOINTING = {"gradient_checkpointing": {"choices": [False, True], "default": False, "why": "test"}}
SCOPE = {"scope": {"choices": ["none", "layer", "model"], "default": "none", "why": "test"}}
MODE_BY_SCOPE = {
    "mode": [
        {"choices": ["default"], "default": "default", "when": {"scope": ["model"]}, "why": "test"},
        {
            "choices": ["default", "reduce-overhead", "max-autotune"],
            "default": "default",
            "when": {"scope": ["layer"]},
            "why": "test",
        },
    ]
}
NO_LIMIT = math.lcm(*range(1, 65))  # a global batch that every micro-batch divides
CONDITIONAL = {**SCOPE, **MODE_BY_SCOPE}  # none, model/default and three modes of layer: five configs


def study(parameters: dict[str, Any], sampler: str = "auto", **fields: Any) -> StudySpec:
    space = SearchSpace.model_validate({"format": 1, "parameters": parameters})
    usual = {"workload": WorkloadSpec(model="tiny-llama"), "plan": Search.model_validate({"sampler": sampler})}
    return StudySpec(space=space, **{**usual, **fields})


def ask(
    spec: StudySpec, records: Sequence[TrialRecord] = (), admissible: Callable[[Config], bool] = lambda config: True
) -> Config | None:
    return suggest(spec, FACTS, records=records, admissible=admissible)


def record(number: int, config: Config, state: State = State.COMPLETE, **fields: Any) -> TrialRecord:
    role = fields.pop("role", Role.SEARCH)
    return TrialRecord(number=number, role=role, state=state, config=dict(config), **fields)


def slice_of(number: int, config: Config) -> TrialRecord:
    """Throughput grows with the micro-batch, and above 32 memory runs out."""
    batch = int(config["micro_batch"])
    if batch > 32:
        return record(number, config, State.PRUNED, outcome=OOM)
    return record(number, config, value=float(batch))


def run(spec: StudySpec, n_trials: int, measure: Callable[[int, Config], TrialRecord]) -> list[TrialRecord]:
    records: list[TrialRecord] = []
    while len(records) < n_trials and (config := ask(spec, records)):
        records.append(measure(len(records), config))
    return records


@pytest.mark.parametrize("seed", range(5))
def test_out_of_memory_teaches_the_sampler(seed: int) -> None:
    # 128 configs, so that not asking twice cannot fake it. Told as FAIL, 0.85 to 0.95 of the late ones are above 32.
    records = run(study({**BATCH, **CHECKPOINTING}, seed=1000 * seed), 60, slice_of)
    late = [int(record.config["micro_batch"]) for record in records[20:]]
    assert len(late) == 40
    assert sum(batch > 32 for batch in late) <= 0.6 * len(late)
    assert max(record.value or 0 for record in records) == 32


@pytest.mark.parametrize("seed", range(5))
def test_out_of_memory_teaches_the_whole_search(seed: int) -> None:
    """As a study runs: baselines and climbs first, and what a failure rules out is not asked for."""
    spec = study({**BATCH, **CHECKPOINTING}, seed=1000 * seed, budget=Budget(trials=60))
    records: list[TrialRecord] = []
    while isinstance(step := next_step(spec, FACTS, records, 0), Measure | Ask):
        config = step.config if isinstance(step, Measure) else ask(spec, records, admissible(spec, FACTS, records, 0))
        if config is None or (isinstance(step, Measure) and step.role is Role.CONFIRM):
            break
        batch, role = int(config["micro_batch"]), step.role if isinstance(step, Measure) else Role.SEARCH
        state = State.PRUNED if batch > 32 else State.COMPLETE
        outcome = OOM if batch > 32 else measured(float(batch))
        value = None if batch > 32 else float(batch)
        records.append(record(len(records), config, state, role=role, outcome=outcome, value=value))
    late = [int(record.config["micro_batch"]) for record in records[20:]]
    assert len(late) >= 20
    assert sum(batch > 32 for batch in late) <= 0.6 * len(late)
    assert max(record.value or 0 for record in records) == 32


def test_tight_memory_teaches_the_sampler_though_it_is_fast() -> None:
    def tight_above_32(number: int, config: Config) -> TrialRecord:
        batch = int(config["micro_batch"])
        outcome = measured(float(batch), degraded=("tight_memory",) if batch > 32 else ())
        return record(number, config, value=float(batch), outcome=outcome)

    records = run(study({**BATCH, **CHECKPOINTING}), 60, tight_above_32)
    assert sum(int(record.config["micro_batch"]) > 32 for record in records[20:]) <= 24  # 39 where speed alone counts


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random", "grid"])
def test_every_config_is_asked_once_and_then_none(sampler: str) -> None:
    spec = study(CONDITIONAL, sampler)
    records = run(spec, 100, lambda number, config: record(number, config, value=1.0))
    assert [key(record.config) for record in records] != []
    assert sorted(map(repr, (record.config for record in records))) == sorted(
        map(repr, map(dict, candidates(spec, FACTS)))
    )


@pytest.mark.parametrize("sampler", ["auto", "random", "grid"])
def test_a_restart_asks_the_same(sampler: str) -> None:
    spec = study({**BATCH, **CHECKPOINTING}, sampler, seed=7)
    records = run(spec, 15, slice_of)
    assert all(ask(spec, records[:number]) == record.config for number, record in enumerate(records))


def test_another_seed_asks_for_others() -> None:
    first, second = (run(study({**BATCH, **CHECKPOINTING}, seed=seed), 8, slice_of) for seed in (1, 1000))
    assert [record.config for record in first] != [record.config for record in second]


def test_grid_goes_in_order() -> None:
    spec = study(BATCH, "grid")
    records = run(spec, 5, slice_of)
    assert [record.config["micro_batch"] for record in records] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("state", "role", "asked_again"),
    [
        pytest.param(State.RUNNING, Role.SEARCH, False, id="a running config is not asked for"),
        pytest.param(State.FAIL, Role.SEARCH, False, id="nor one that the machine lost"),
        pytest.param(State.PRUNED, Role.PROBE, False, id="nor a failed probe"),
        pytest.param(State.COMPLETE, Role.BASELINE, False, id="nor a baseline"),
        pytest.param(State.COMPLETE, Role.CONFIRM, True, id="a confirmation alone is no try"),
    ],
)
@pytest.mark.parametrize("sampler", ["auto", "random", "grid"])
def test_what_counts_as_tried(sampler: str, state: State, role: Role, asked_again: bool) -> None:
    spec = study({**BATCH, "micro_batch": {**BATCH["micro_batch"], "high": 1, "default": 1}}, sampler)
    (only,) = candidates(spec, FACTS)
    value = 1.0 if state is State.COMPLETE else None
    assert (ask(spec, [record(0, only, state, role=role, value=value)]) == only) is asked_again


@pytest.mark.parametrize("sampler", ["auto", "random", "grid"])
def test_only_admissible_configs_are_asked_for(sampler: str) -> None:
    spec = study(BATCH, sampler)
    asked = ask(spec, admissible=lambda config: config["micro_batch"] == 41)
    assert asked == canonical({"micro_batch": 41})
    assert ask(spec, admissible=lambda config: False) is None


def test_a_config_that_is_spelt_otherwise_is_the_same_config() -> None:
    spec = study(CONDITIONAL)
    tried = record(0, {**canonical({}), "mode": "max-autotune"}, value=1.0)  # eager: the mode means nothing
    asked = [ask(study(CONDITIONAL, seed=seed), [tried]) for seed in range(20)]
    assert all(config is not None and config["scope"] != "none" for config in asked)
    assert len(candidates(spec, FACTS)) == 5


def test_conditional_parameters_are_learned_per_block() -> None:
    spec = study({**CONDITIONAL, **BATCH}, seed=100)
    best = {"scope": "layer", "mode": "reduce-overhead"}

    def by_mode(number: int, config: Config) -> TrialRecord:
        fit = all(config[name] == value for name, value in best.items())
        return record(number, config, value=100.0 * fit + int(config["micro_batch"]) / 64)

    late = run(spec, 60, by_mode)[30:]
    fits = sum(all(record.config[name] == value for name, value in best.items()) for record in late)
    assert fits >= 9  # 3 by chance


def test_a_knob_that_all_candidates_agree_on_costs_no_asks() -> None:
    # Were the pinned batch asked for, one ask in 64 would hit it, and most configs would be picked at random.
    limit = {"cache_size_limit": {"low": 1, "high": 64, "scale": "linear", "default": 8, "why": "test"}}
    layer = {"scope": {"choices": ["layer"], "default": "layer", "why": "test"}}
    spec = study({**BATCH, **layer, **limit, **CHECKPOINTING}, pinned={"micro_batch": 37}, seed=5)

    def by_limit(number: int, config: Config) -> TrialRecord:
        return record(number, config, value=float(config["cache_size_limit"]))

    records = run(spec, 40, by_limit)
    assert {record.config["micro_batch"] for record in records} == {37}
    late = [int(record.config["cache_size_limit"]) for record in records[20:]]
    assert sum(late) / len(late) > 44  # 32 by chance


def measured(tokens_per_second: float, cold_seconds: float = 0.0, **fields: Any) -> Measured:
    return Measured(
        measurement=Measurement(
            tokens_per_second=tokens_per_second,
            step_seconds=StepSeconds(median=1, low=1, high=1, n=5),
            compile=Compile(seconds=cold_seconds, cold_seconds=cold_seconds, cache="cold"),
            **fields,
        )
    )


@pytest.mark.parametrize(
    ("planned", "prefers_big"),
    [
        pytest.param({}, True, id="steady speed alone counts: big batches"),
        pytest.param({"planned_tokens": 1000}, False, id="a short run pays for the compile: small batches"),
        pytest.param({"planned_steps": 10}, False, id="a few steps: small batches"),
        pytest.param({"planned_steps": 10**9}, True, id="many steps: big batches"),
    ],
)
def test_a_planned_run_changes_what_is_looked_for(planned: dict[str, int], prefers_big: bool) -> None:
    def costly_when_big(number: int, config: Config) -> TrialRecord:
        batch = int(config["micro_batch"])
        return record(number, config, value=100.0 + batch, outcome=measured(100.0 + batch, cold_seconds=batch * 10.0))

    workload = WorkloadSpec(model="tiny-llama", global_batch=NO_LIMIT if "planned_steps" in planned else None)
    spec = study({**BATCH, **CHECKPOINTING}, workload=workload, seed=2, **planned)
    late = [int(record.config["micro_batch"]) for record in run(spec, 40, costly_when_big)[20:]]
    assert (sum(late) / len(late) > 32) is prefers_big
