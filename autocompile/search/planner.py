"""What to measure next, as a function of what is known: the first phase that is not done decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autocompile.records import FailureKind, State, TrialRecord, Verdict
from autocompile.search.affordability import Means, is_open, left_seconds
from autocompile.search.canonical import candidates, in_space, is_eager, key, known_to_fail
from autocompile.search.history import History, history_of
from autocompile.search.known_good import baselines, climbs, owed, plain_compile, with_each_padding
from autocompile.search.rounds import next_confirmation
from autocompile.search.treatment import brake_reason, deserves_repeat, is_over
from autocompile.search.verdict import verdict
from autocompile.space import Config
from autocompile.spec import FULL_DEPTH, Facts, Fidelity, Grid, Paired, Plan, Role, Search, StudySpec

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
            return Wait() if _is_disturbed(step, means.history.running) else step
    return _end(means.history)


def admissible(
    spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], seconds_used: float
) -> Callable[[Config], bool]:
    """Whether the sampler may choose a config: in the space, untried, not ruled out, and its slice fits."""
    return _admissible(_means(spec, facts, records, seconds_used))


def compile_deadline(
    spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], seconds_used: float, config: Config
) -> float:
    """Seconds a search slice may take to its first step, so that the time for confirmations is kept."""
    means = _means(spec, facts, records, seconds_used)
    return means.compile_deadline_seconds(owed=_is_owed(means.history, config))


def _phases(plan: Plan) -> tuple[Callable[[Means], Step | None], ...]:
    match plan:
        case Search():
            return _repeat, _baseline, _known_good, _plain_compile, _search, _confirm, _sustain, _rest
        case Grid():
            return _repeat, _grid
        case Paired():
            return (_confirm,)


def _is_disturbed(step: Step, beside: Sequence[TrialRecord]) -> bool:
    """A baseline and a slice that compiles do not run beside each other: compilers would take the host's time from it.

    No later step is taken instead of one that waits, else the next compiled slice would put a baseline off for ever.
    """
    match step:
        case Measure(config=config, role=role):
            compiles, is_baseline = not is_eager(config), role is Role.BASELINE
        case Ask():
            compiles, is_baseline = True, False  # whatever the sampler will choose
        case _:
            return False
    beside_compiled = any(not is_eager(record.config) for record in beside)
    beside_baseline = any(record.role is Role.BASELINE for record in beside)
    return (is_baseline and beside_compiled) or (compiles and beside_baseline)


def _means(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], seconds_used: float) -> Means:
    return Means(history_of(spec, facts, tuple(records)), left_seconds(spec, seconds_used))


def _repeat(means: Means) -> Step | None:
    """A slice that was lost, or failed for what may not be its config's fault, is measured again."""
    history = means.history
    for attempts in history.trials.values():
        if not deserves_repeat(attempts):
            continue
        last = attempts[-1]
        counted = any(record.state is State.PRUNED for record in attempts)
        fits = means.fits(last.config, owed=_is_owed(history, last.config))
        if fits and (counted or _trials_left(history)):
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
    """Settings that usually win, then micro-batches and paddings, eager's too: its best must be known to be fair."""
    history = means.history
    if not _trials_left(history):
        return None
    for config in owed(history):
        if known_to_fail(config) is None and is_open(history, config) and means.fits(config, owed=True):
            return _measure(history, config)
    for config in climbs(history):
        if is_open(history, config) and means.fits_with_eager(config):
            return _measure(history, config)
    for config in with_each_padding(history):
        if _may_start(means, config):
            return _measure(history, config)
    return None


def _measure(history: History, config: Config) -> Measure:
    today = history.spec.against
    is_baseline = is_eager(config) or (today is not None and key(config) == key(today))
    return Measure(config, Role.BASELINE if is_baseline else Role.SEARCH, FULL_DEPTH)


def _is_owed(history: History, config: Config) -> bool:
    return isinstance(history.spec.plan, Search) and key(config) in map(key, owed(history))


def _plain_compile(means: Means) -> Step | None:
    history = means.history
    config = plain_compile(history)
    if config is None or not _trials_left(history) or not is_open(history, config):
        return None
    return Measure(config, Role.BASELINE, FULL_DEPTH) if means.pays(config) else None


def _search(means: Means) -> Step | None:
    history = means.history
    if not _trials_left(history) or brake_reason(history.records):
        return None
    may_start = _admissible(means)
    return Ask(FULL_DEPTH) if any(may_start(config) for config in candidates(history.spec, history.facts)) else None


def _confirm(means: Means) -> Step | None:
    """Blocks of confirmations, one slice at a time and nothing beside it."""
    if means.history.running:
        return Wait()
    config = next_confirmation(means)
    return None if config is None else Measure(config, Role.CONFIRM, FULL_DEPTH)


def _sustain(means: Means) -> Step | None:
    """A sustained minute of what was chosen: a GPU that heats up slows down after a short window has ended."""
    history = means.history
    found = verdict(history.spec, history.facts, history.records)
    if not found.confirmed or found.config is None or not means.sustained_seconds(found.config):
        return None
    over = is_over(history.sustained.get(key(found.config), []))
    fits = means.sustained_seconds(found.config) <= means.left
    return Measure(found.config, Role.PROBE, FULL_DEPTH) if fits and not over else None


def _rest(means: Means) -> Step | None:
    """Where the time left holds no confirmation, at least what the verdict owes."""
    history = means.history
    if history.confirmations or not _trials_left(history):
        return None
    for config in owed(history):
        if known_to_fail(config) is None and is_open(history, config) and means.ends_in_time(config):
            return _measure(history, config)
    return None


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
    if limit is None:
        return True
    counted = sum(any(record.state is not State.FAIL for record in attempts) for attempts in history.trials.values())
    return counted < limit
