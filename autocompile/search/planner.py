"""What to measure next, as a function of what is known: the first phase that is not done decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autocompile.records import FailureKind, State, TrialRecord, Verdict
from autocompile.search.affordability import Means, is_open, left_seconds
from autocompile.search.canonical import candidates, in_space, key, known_to_fail
from autocompile.search.cost import confirm_seconds
from autocompile.search.history import History, deserves_repeat
from autocompile.search.known_good import baselines, climbs, first_compiled, plain_compile
from autocompile.search.rounds import missing, missing_eager
from autocompile.search.verdict import verdict
from autocompile.space import Config
from autocompile.spec import FULL_DEPTH, Facts, Fidelity, Grid, Paired, Plan, Role, Search, StudySpec

_FAULTS_IN_A_ROW = 3
_MEMORY_FAILURES = (FailureKind.OOM, FailureKind.HOST_OOM)


@dataclass(frozen=True)
class Measure:
    """Start a slice of this config."""

    config: Config
    role: Role
    fidelity: Fidelity


@dataclass(frozen=True)
class Ask:
    """Let the sampler choose a config among the admissible ones."""

    fidelity: Fidelity


@dataclass(frozen=True)
class Wait:
    """Nothing can start before a running slice ends."""


@dataclass(frozen=True)
class Finished:
    """Nothing is left to do that fits."""

    verdict: Verdict


Step: TypeAlias = Measure | Ask | Wait | Finished


def next_step(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], seconds_used: float) -> Step:
    """The next step for one free slot; ``records`` hold the slices of the others as RUNNING."""
    means = _means(spec, facts, records, seconds_used)
    for phase in _phases(spec.plan):
        if step := phase(means):
            return step
    return _end(means.history)


def admissible(
    spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], seconds_used: float
) -> Callable[[Config], bool]:
    """Whether the sampler may choose a config: in the space, untried, not ruled out, and its slice fits."""
    return _admissible(_means(spec, facts, records, seconds_used))


def compile_deadline(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], seconds_used: float) -> float:
    """Seconds a search slice may take to its first step, so that the time for confirmations is kept."""
    return _means(spec, facts, records, seconds_used).compile_deadline_seconds


def abort_reason(records: Sequence[TrialRecord]) -> str | None:
    """The message of the last of three machine faults in a row; None while the machine seems to work."""
    finished = sorted((record for record in records if record.state is not State.RUNNING), key=lambda r: r.number)
    latest = finished[-_FAULTS_IN_A_ROW:]
    if len(latest) < _FAULTS_IN_A_ROW or not all(_machine_fault(record) for record in latest):
        return None
    failure = latest[-1].failure
    assert failure is not None
    return f"{_FAULTS_IN_A_ROW} slices in a row failed on this machine, the last with {failure.kind}: {failure.message}"


def _phases(plan: Plan) -> tuple[Callable[[Means], Step | None], ...]:
    match plan:
        case Search():
            return _repeat, _baseline, _known_good, _plain_compile, _search, _confirm
        case Grid():
            return _repeat, _grid
        case Paired():
            return (_confirm,)


def _means(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], seconds_used: float) -> Means:
    return Means(History(spec, facts, tuple(records)), left_seconds(spec, seconds_used))


def _repeat(means: Means) -> Step | None:
    """A slice that was lost, or failed for what may not be its config's fault, is measured again."""
    history = means.history
    for attempts in history.trials.values():
        last = attempts[-1]
        counted = any(record.state is State.PRUNED for record in attempts)
        if deserves_repeat(attempts) and means.fits(last.config) and (counted or _trials_left(history)):
            return Measure(last.config, last.role, FULL_DEPTH)
    return None


def _baseline(means: Means) -> Step | None:
    """Eager first, with less memory until it fits. A machine that cannot run even this is tried until it aborts."""
    history = means.history
    for config in baselines(history.spec, history.facts):
        attempts = history.trials.get(key(config), [])
        last = attempts[-1] if attempts else None
        if last is None or last.state is State.FAIL:
            may_start = means.left > 0 and _trials_left(history)
            return Measure(config, Role.BASELINE, FULL_DEPTH) if may_start else _end(history)
        if last.state is State.RUNNING:
            return Wait()
        if last.state is State.COMPLETE:
            return None
        if last.failure is None or last.failure.kind not in _MEMORY_FAILURES:
            return _end(history)  # eager training itself does not work, so nothing else will
    return None


def _known_good(means: Means) -> Step | None:
    """Settings that usually win, then micro-batches: eager's own best must be known for an honest comparison."""
    history = means.history
    if not _trials_left(history):
        return None
    for config in first_compiled(history):
        if known_to_fail(config) is None and _may_start(means, config):
            return Measure(config, Role.SEARCH, FULL_DEPTH)
    for config in climbs(history):
        if _may_start(means, config):
            eager = config["scope"] == "none"
            return Measure(config, Role.BASELINE if eager else Role.SEARCH, FULL_DEPTH)
    return None


def _plain_compile(means: Means) -> Step | None:
    history = means.history
    config = plain_compile(history)
    if config is None or not _trials_left(history) or not is_open(history, config):
        return None
    return Measure(config, Role.BASELINE, FULL_DEPTH) if means.pays(config) else None


def _search(means: Means) -> Step | None:
    history = means.history
    if not _trials_left(history):
        return None
    may_start = _admissible(means)
    return Ask(FULL_DEPTH) if any(may_start(config) for config in candidates(history.spec, history.facts)) else None


def _confirm(means: Means) -> Step | None:
    """One round, one slice at a time and nothing beside it, begun only if all of it fits."""
    history = means.history
    if history.running:
        return Wait()
    waiting = missing(history)
    if not waiting and (eager := missing_eager(history)) is not None:
        waiting = [eager]
    if not waiting:
        return None
    seconds = sum(confirm_seconds(history.costs, config) for config in waiting)
    unknown = not history.costs.measured and means.left > 0
    return Measure(waiting[0], Role.CONFIRM, FULL_DEPTH) if seconds <= means.left or unknown else None


def _grid(means: Means) -> Step | None:
    history = means.history
    for config in candidates(history.spec, history.facts):
        if _trials_left(history) and _may_start(means, config):
            return Measure(config, Role.SEARCH, FULL_DEPTH)
    return None


def _may_start(means: Means, config: Config) -> bool:
    return is_open(means.history, config) and means.fits(config)


def _admissible(means: Means) -> Callable[[Config], bool]:
    """Pairs known to fail only after everything else, and one of a kind at a time: its failure rules out the others."""
    history = means.history
    spec, facts = history.spec, history.facts
    tried_now = {known_to_fail(record.config) for record in history.running} - {None}

    def may_start(config: Config) -> bool:
        return is_open(history, config) and means.pays(config)

    usual = (config for config in candidates(spec, facts) if known_to_fail(config) is None)
    usual_left = any(may_start(config) for config in usual)

    def answer(config: Config) -> bool:
        pair = known_to_fail(config)
        turn = usual_left if pair is None else not usual_left and pair not in tried_now
        return turn and in_space(spec, facts, config) and may_start(config)

    return answer


def _end(history: History) -> Step:
    if history.running:
        return Wait()
    return Finished(verdict(history.spec, history.facts, history.records))


def _trials_left(history: History) -> bool:
    """Failures of the machine do not count, nor do repeats; what runs does."""
    limit = history.spec.budget.trials
    counted = sum(any(record.state is not State.FAIL for record in attempts) for attempts in history.trials.values())
    return limit is None or counted < limit


def _machine_fault(record: TrialRecord) -> bool:
    failed = record.failure is not None and record.failure.kind.blames_machine
    return record.state is State.FAIL and record.stopped is None and failed
