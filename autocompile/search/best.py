"""The best-config file's content: what to train with, what to expect of it, and where it holds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from autocompile.best_file import BestConfig, BestWorkload, Evidence, Expected, MadeFor
from autocompile.records import Result, State, TrialRecord
from autocompile.search.canonical import canonical, key, micro_batch
from autocompile.search.history import History, history_of
from autocompile.search.verdict import verdict
from autocompile.space import Config
from autocompile.spec import (
    Facts,
    Role,
    StudySpec,
    gradient_accumulation,
)
from autocompile.values import major_minor

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
        expected=_expected(history_of(spec, facts, tuple(records)), config, found.confirmed_by),
        evidence=Evidence(
            speedup=found.speedup,
            speedup_vs_best_eager=found.speedup_vs_best_eager,
            confirmed_by=found.confirmed_by,
            break_even_steps=found.break_even_steps,
        ),
        made_for=_made_for(spec, facts, config),
        workload=BestWorkload(
            micro_batch=micro_batch(config),
            gradient_accumulation=gradient_accumulation(spec.workload, config),
            precision=str(facts.precision),
            spec=spec.workload,
            regions=facts.regions if spec.workload.script else None,
        ),
    )


def _expected(history: History, config: Config, confirmed_by: Sequence[int]) -> Expected:
    """Medians and extremes of the confirming processes; of a single measurement its own interval.

    A sustained minute, where there was one, replaces the medians: it is what a long training sees.
    """
    runs = [r for r in history.records if r.state is State.COMPLETE and key(r.config) == key(config)]
    sustained = [r for r in runs if r.role is Role.PROBE]
    kept = [r for r in runs if r.number in confirmed_by] or [r for r in runs if r.role is not Role.PROBE][-1:]
    found = [r.measurement for r in kept if r.measurement]
    typical = [r.measurement for r in sustained or kept if r.measurement]
    telemetry = kept[-1].outcome.telemetry if kept[-1].outcome else None
    return Expected(
        tokens_per_second=(
            median(m.tokens_per_second for m in typical),
            min(m.tokens_per_second * m.step_seconds.median / m.step_seconds.high for m in (*found, *typical)),
            max(m.tokens_per_second * m.step_seconds.median / m.step_seconds.low for m in (*found, *typical)),
        ),
        step_seconds=(
            median(m.step_seconds.median for m in typical),
            min(m.step_seconds.low for m in (*found, *typical)),
            max(m.step_seconds.high for m in (*found, *typical)),
        ),
        peak_memory_bytes=max((m.peak_memory_bytes for m in found if m.peak_memory_bytes), default=None),
        compile_seconds=history.cold_seconds[key(config)],
        graphs=telemetry.graphs if telemetry else None,
    )


def _made_for(spec: StudySpec, facts: Facts, config: Config) -> MadeFor:
    workload = spec.workload.of_config(config)
    return MadeFor(
        gpu=facts.environment.get("gpu", facts.devices[0].name),
        torch=major_minor(facts.environment.get("torch")) or "unknown",
        triton=major_minor(facts.environment.get("triton")),
        method=str(facts.method),
        model_type=facts.model_type,
        parallel=workload.parallel,
        world_size=workload.gpus_per_trial,
        sequence_length=workload.sequence_length,
    )
