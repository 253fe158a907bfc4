"""What every report is made from, and the rows of its table of best configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from autocompile.knob_table import KnobValue
from autocompile.records import Derived, Measurement, State, TrialRecord, Verdict
from autocompile.space import Config
from autocompile.spec import FULL_DEPTH, Facts, Role, StudySpec


@dataclass(frozen=True, kw_only=True)
class Study:
    """One study as it stands. ``total_seconds`` is its budget, None where there is no limit.

    ``brake`` is why its search ended although there was something left to try.
    """

    name: str
    spec: StudySpec
    facts: Facts
    records: Sequence[TrialRecord]
    derived: Sequence[Derived]
    verdict: Verdict
    used_seconds: float
    total_seconds: float | None
    brake: str | None = None

    def report(self) -> str:
        """The text of ``report.md``."""
        from autocompile.report.document import places_here
        from autocompile.report.markdown import markdown

        return markdown(self, places_here(self.spec.workload.script))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One config over all its full-depth runs; times are medians, memory and compile the largest seen."""

    config: dict[str, KnobValue]
    tokens_per_second: float
    step_seconds: float
    peak_memory_bytes: int | None
    compile_seconds: float
    trials: tuple[int, ...]
    confirmed: bool
    degraded: tuple[str, ...]
    unit: str

    @property
    def state(self) -> str:
        """How far the row may be trusted."""
        known = "confirmed" if self.confirmed else "measured once" if len(self.trials) == 1 else "measured"
        return ", ".join([known, *(flag.replace("_", " ") for flag in self.degraded)])


def measured(records: Sequence[TrialRecord]) -> list[tuple[TrialRecord, Measurement]]:
    """The slices that count: complete, at full depth."""
    return [
        (record, record.measurement)
        for record in records
        if record.state is State.COMPLETE and record.fidelity == FULL_DEPTH and record.measurement is not None
    ]


def runs_of(config: Config, records: Sequence[TrialRecord]) -> list[tuple[TrialRecord, Measurement]]:
    """The runs that speak for a config: its confirmations where there are any, else all of its slices."""
    runs = [(record, found) for record, found in measured(records) if record.config == dict(config)]
    return [run for run in runs if run[0].role is Role.CONFIRM] or runs


def spread(study: Study) -> float:
    """How far step times of one config lie apart, as a share: between its runs, or between the ends of one interval.

    The worst of the configs that the verdict rests on; 0 where it rests on nothing.
    """
    confirmed = [record for record in study.records if record.number in study.verdict.confirmed_by]
    worst = 0.0
    for config in [record.config for record in confirmed]:
        steps = [found.step_seconds for record, found in measured(study.records) if record.config == config]
        between = max(step.median for step in steps) / min(step.median for step in steps) - 1
        within = max((step.high - step.low) / step.median for step in steps)
        worst = max(worst, between, within)
    return worst


def row(config: Config, records: Sequence[TrialRecord]) -> Row | None:
    """The table's row of one config; None where it was never measured at full depth."""
    runs = runs_of(config, records)
    if not runs:
        return None
    found = [measurement for _, measurement in runs]
    peaks = [measurement.peak_memory_bytes for measurement in found if measurement.peak_memory_bytes is not None]
    return Row(
        config=dict(config),
        tokens_per_second=median(measurement.tokens_per_second for measurement in found),
        step_seconds=median(measurement.step_seconds.median for measurement in found),
        peak_memory_bytes=max(peaks, default=None),
        compile_seconds=max(one.compile.cold_seconds for kept, one in measured(records) if kept.config == dict(config)),
        trials=tuple(record.number for record, _ in runs),
        confirmed=len(runs) > 1 and runs[0][0].role is Role.CONFIRM,
        degraded=tuple(sorted({flag for measurement in found for flag in measurement.degraded})),
        unit=found[0].unit,
    )


def best_rows(records: Sequence[TrialRecord], *, limit: int) -> list[Row]:
    """The fastest configs, fastest first; the best eager one is always among them."""
    by_config: dict[tuple[tuple[str, KnobValue], ...], list[TrialRecord]] = {}
    for record, _ in measured(records):
        by_config.setdefault(tuple(sorted(record.config.items())), []).append(record)
    rows = sorted(
        (found for own in by_config.values() if (found := row(own[0].config, own))),
        key=lambda found: -found.tokens_per_second,
    )
    eager = [found for found in rows[limit:] if found.config["scope"] == "none"]
    if eager and all(found.config["scope"] != "none" for found in rows[:limit]):
        return [*rows[: limit - 1], eager[0]]
    return rows[:limit]
