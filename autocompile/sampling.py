"""From the records of a study to the config to measure next, through an in-memory Optuna study made for one question.

No question depends on the one before, so a restart asks the same. A failure of the config goes in as PRUNED with a
violated constraint: told as FAIL it would be ignored, and TPE then asks for what runs out of memory in nine cases of
ten.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autocompile.knob_table import KnobValue
from autocompile.records import State, TrialRecord
from autocompile.search.canonical import Key, by_key, canonical, key
from autocompile.search.objective import objective
from autocompile.search.per_record import PerRecord
from autocompile.space import Choices, Config, Parameter, Traits, choose
from autocompile.spec import Facts, Role, Search, StudySpec, traits
from autocompile.values import remembered

N_STARTUP_TRIALS = 3  # the known-good configs come first and teach more than random ones
N_ASKS = 20


def suggest(
    spec: StudySpec,
    facts: Facts,
    *,
    records: Sequence[TrialRecord],
    admissible: Callable[[Config], bool],
) -> Config | None:
    """One of the canonical configs of the space that is admissible and untried; None if none is left.

    Tried is what any baseline, probe or search trial has or had, whatever became of it.
    """
    told = [record for record in records if record.role is not Role.CONFIRM]
    tried, known = {key(record.config) for record in told}, by_key(spec, facts)

    def may_be(name: Key) -> bool:
        return name in known and name not in tried and admissible(known[name])

    seed = spec.seed + len(records)
    match spec.plan:
        case Search(sampler="auto" | "tpe") if len(known) > len(tried) or not known.keys() <= tried:
            walk = _walk(spec, facts)
            asked = map(key, islice(_asks(_study(walk, told, seed=seed), walk), N_ASKS))
            found = next(filter(may_be, asked), None)
        case Search(sampler="grid"):
            found = next(filter(may_be, known), None)
        case _:
            found = None
    if found is None:
        found = _any(list(known), may_be, random.Random(seed))
    return None if found is None else known[found]


def _any(names: Sequence[Key], may_be: Callable[[Key], bool], rng: random.Random) -> Key | None:
    """One at random, each as likely; most often a few throws do, without a look at all of them."""
    for name in rng.choices(names, k=N_ASKS) if names else ():
        if may_be(name):
            return name
    left = list(filter(may_be, names))
    return rng.choice(left) if left else None


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """How configs and Optuna's parameters turn into each other. ``fixed`` is what all candidates agree on."""

    spec: StudySpec
    traits: Traits
    fixed: Config

    def ask(self, trial: Trial) -> Config:
        """The space walked with the sampler's choices, so that a condition is asked before what hangs on it."""

        def pick(name: str, block: int, parameter: Parameter) -> KnobValue:
            label, values = _label(name, block), parameter.values()
            if isinstance(parameter, Choices):
                return values[values.index(trial.suggest_categorical(label, values))]
            return values[trial.suggest_int(label, 0, len(values) - 1)]

        return choose(self.spec.space, self.traits, self.fixed, pick)

    def told(self, config: Config) -> tuple[dict[str, KnobValue], dict[str, BaseDistribution]]:
        """This config as Optuna's parameters and distributions; what is no value of the space is left out."""
        params: dict[str, KnobValue] = {}
        distributions: dict[str, BaseDistribution] = {}

        def pick(name: str, block: int, parameter: Parameter) -> KnobValue:
            value, values = config[name], parameter.values()
            if value in values:
                ranged = not isinstance(parameter, Choices)
                params[_label(name, block)] = values.index(value) if ranged else value
                distributions[_label(name, block)] = (
                    IntDistribution(0, len(values) - 1) if ranged else CategoricalDistribution(values)
                )
            return value

        choose(self.spec.space, self.traits, self.fixed, pick)
        return params, distributions


@remembered(2)
def _trials(walk: _Walk) -> PerRecord[FrozenTrial | None]:
    return PerRecord(partial(_trial, walk))


@remembered(2)
def _walk(spec: StudySpec, facts: Facts) -> _Walk:
    return _Walk(spec=spec, traits=traits(spec, facts), fixed=_fixed(list(by_key(spec, facts).values())))


def _asks(study: optuna.Study, walk: _Walk) -> Iterator[Config]:
    """What TPE asks for, for ever; each one stays open in the study, so that the liar drives the next elsewhere."""
    while True:
        yield walk.ask(study.ask())


def _study(walk: _Walk, told: Sequence[TrialRecord], *, seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of ``group``
        sampler = TPESampler(
            multivariate=True, group=True, constant_liar=True, n_startup_trials=N_STARTUP_TRIALS, seed=seed
        )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trials(filter(None, _trials(walk).of(told)))
    return study


def _trial(walk: _Walk, record: TrialRecord) -> FrozenTrial | None:
    """None where the record teaches nothing about its config: a failure of the machine, no full-depth value."""
    params, distributions = walk.told(canonical(record.config))
    match record.state:
        case State.RUNNING:
            return create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
        case State.PRUNED:
            failed = {str(record.failure.kind): 1.0} if record.failure else None
            return create_trial(state=TrialState.PRUNED, params=params, distributions=distributions, constraints=failed)
        case State.COMPLETE if (value := _value(walk.spec, record)) is not None:
            return create_trial(value=value, params=params, distributions=distributions, constraints=_tight(record))
    return None


def _value(spec: StudySpec, record: TrialRecord) -> float | None:
    if record.value is None or record.measurement is None:
        return record.value
    return objective(spec, record.measurement, full_depth=record.value)


def _tight(record: TrialRecord) -> dict[str, float] | None:
    """Above the memory headroom a config cannot win, but it is nearer to one that can than a failure is."""
    tight = record.measurement is not None and "tight_memory" in record.measurement.degraded
    return {"tight_memory": 0.5} if tight else None


def _fixed(candidates: Sequence[Config]) -> Config:
    """Knobs with one value in all candidates: pinned ones, and those that the workload or the batch freezes."""
    first = candidates[0]
    return {name: value for name, value in first.items() if all(other[name] == value for other in candidates)}


def _label(name: str, block: int) -> str:
    """Blocks of one parameter are parameters of their own to Optuna, which wants one distribution under a name."""
    return f"{name}.{block}"
