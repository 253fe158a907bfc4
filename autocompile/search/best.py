"""The best-config file's content: what to train with, what to expect of it, and where it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autocompile.records import Result, State, TrialRecord
from autocompile.search.canonical import canonical, key, micro_batch
from autocompile.search.history import History
from autocompile.search.verdict import verdict
from autocompile.space import Config
from autocompile.spec import (
    BestConfig,
    BestWorkload,
    Evidence,
    Expected,
    Facts,
    MadeFor,
    Role,
    StudySpec,
    gradient_accumulation,
    major_minor,
)

_RESULTS: dict[Result, Literal["win", "tie", "loss"]] = {
    Result.WIN: "win",
    Result.TIE: "tie",
    Result.LOSS: "loss",
}


def best_config(name: str, spec: StudySpec, facts: Facts, records: Sequence[TrialRecord]) -> BestConfig | None:
    """The file of the study ``name``, by its verdict; None where nothing was measured."""
    found = verdict(spec, facts, records)
    if found.config is None:
        return None
    config = canonical(found.config)
    return BestConfig(
        study=name,
        result=_RESULTS[found.result],
        config=config,
        expected=_expected(History(spec, facts, tuple(records)), config, found.confirmed_by),
        evidence=Evidence(
            speedup=found.speedup,
            speedup_vs_best_eager=found.speedup_vs_best_eager,
            confirmed_by=found.confirmed_by,
            break_even_steps=found.break_even_steps,
        ),
        made_for=_made_for(spec, facts),
        workload=BestWorkload(
            micro_batch=micro_batch(config),
            gradient_accumulation=gradient_accumulation(spec.workload, config),
            precision=str(facts.precision),
            spec=spec.workload,
            regions=facts.regions if spec.workload.script else None,
        ),
    )


def _expected(history: History, config: Config, confirmed_by: Sequence[int]) -> Expected:
    measured = [r for r in history.records if r.state is State.COMPLETE and key(r.config) == key(config)]
    record = max(measured, key=lambda r: (r.number in confirmed_by, r.role is not Role.CONFIRM, r.number))
    measurement = record.measurement
    assert measurement is not None and record.outcome is not None
    step, speed = measurement.step_seconds, measurement.tokens_per_second
    return Expected(
        tokens_per_second=(speed, speed * step.median / step.high, speed * step.median / step.low),
        step_seconds=(step.median, step.low, step.high),
        peak_memory_bytes=measurement.peak_memory_bytes,
        compile_seconds=history.cold_seconds[key(config)],
        graphs=record.outcome.telemetry.graphs,
    )


def _made_for(spec: StudySpec, facts: Facts) -> MadeFor:
    return MadeFor(
        gpu=facts.environment.get("gpu", facts.devices[0].name),
        torch=major_minor(facts.environment.get("torch")) or "unknown",
        triton=major_minor(facts.environment.get("triton")),
        method=str(facts.method),
        model_type=facts.model_type,
        parallel=spec.workload.parallel,
        world_size=spec.workload.gpus_per_trial,
        sequence_length=spec.workload.sequence_length,
    )
