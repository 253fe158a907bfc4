"""What the coordinator costs for each trial of a long study: ``python -m tests.bench.overhead [N_RECORDS [URL]]``.

A study with so many recorded trials goes on for some more, with an executor that answers at once. What passes from the
end of one trial to the end of the next is split into Optuna's calls, the database's, and the rest, which is ours.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest import mock

import optuna
import sqlalchemy as sa
from optuna.storages import RDBStorage

from autocompile import sampling
from autocompile.records import (
    ANSWER,
    Answer,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Stage,
    State,
    TrialRecord,
)
from autocompile.search import Measure, candidates, next_step
from autocompile.search.canonical import key
from autocompile.space import Config, load_space
from autocompile.spec import (
    FULL_DEPTH,
    Budget,
    Device,
    Facts,
    MeasureRequest,
    Role,
    SliceRequest,
    StudySpec,
    WorkloadSpec,
)
from autocompile.storage import Storage, optuna_rows
from autocompile.tuner import Event, Interrupted, TrialEnded, tune
from tests.contract import fake_child

N_RECORDS = 1000
N_MORE = 40
NAME = "long"
OPTUNA = (
    *((RDBStorage, name) for name in ("create_new_trial", "get_trial", "get_all_trials", "set_trial_state_values")),
    *((RDBStorage, name) for name in ("get_study_id_from_name", "get_trial_id_from_study_id_trial_number")),
    *((optuna.Study, name) for name in ("ask", "add_trials")),
    *((optuna.Trial, name) for name in ("suggest_categorical", "suggest_int")),
    *((sampling, name) for name in ("create_trial", "CategoricalDistribution", "IntDistribution", "TPESampler")),
    *((optuna_rows, name) for name in ("create_trial", "CategoricalDistribution", "IntDistribution")),
    (optuna, "create_study"),
)
DATABASE = (
    *((sa.Connection, name) for name in ("execute", "scalars", "exec_driver_sql", "close")),
    *((sa.RootTransaction, name) for name in ("commit", "rollback", "close")),
    (sa.Engine, "connect"),
)
FACTS = Facts(
    devices=(Device(uuid="GPU-0", name="NVIDIA H200", memory_bytes=140 << 30, capability="9.0"),),
    layers=32,
    parameters=6_738_415_616,
    environment={"gpu": "NVIDIA H200", "torch": "2.13.0"},
    regions={"layer": "layers.*", "attention": "*.self_attn", "mlp": "*.mlp"},
)
SPEC = StudySpec(workload=WorkloadSpec(model="llama2-7b"), space=load_space("default"), budget=Budget(seconds=1e6))


@dataclass
class Watch:
    """Seconds by whose they are; only the outermost of nested calls counts, and only in the thread that made this."""

    seconds: dict[str, float] = field(default_factory=lambda: {"Optuna": 0.0, "the database": 0.0})
    inside: bool = False
    study: optuna.Study | None = None
    thread: int = field(default_factory=threading.get_ident)

    def of(self, owner: str, act: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(act)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside or threading.get_ident() != self.thread:
                return act(*args, **kwargs)
            self.inside, began = True, time.perf_counter()
            try:
                result = act(*args, **kwargs)
                if isinstance(result, optuna.Study):
                    self.study = result  # the one before is freed now, which is Optuna's time too
                return result
            finally:
                self.seconds[owner] += time.perf_counter() - began
                self.inside = False

        return timed


@contextmanager
def watched() -> Iterator[Watch]:
    watch = Watch()
    with ExitStack() as stack:
        for owner, calls in (("Optuna", OPTUNA), ("the database", DATABASE)):
            for place, name in calls:
                stack.enter_context(mock.patch.object(place, name, watch.of(owner, getattr(place, name))))
        yield watch


def outcome(config: Config) -> Measured | Failed:
    """Large batches do not fit, one compiled config in ten computes something else."""
    number, batch = random.Random(str(key(config))).random(), int(config["micro_batch"])
    if batch > (64 if config["gradient_checkpointing"] else 16):
        return Failed(failure=Failure(kind=FailureKind.OOM, stage=Stage.WARMUP, message="out of memory"))
    if number < 0.1 and config["scope"] != "none":
        kind, message = FailureKind.NUMERICS_MISMATCH, "gradients differ"
        return Failed(failure=Failure(kind=kind, stage=Stage.CHECK, message=message))
    found = ANSWER.validate_python(fake_child.measurement(config))
    assert isinstance(found, Measured)
    return found


class AtOnce:
    """An executor that does not measure."""

    def run(self, request: SliceRequest, folder: Path) -> Answer:
        assert isinstance(request, MeasureRequest)
        return outcome(request.config)


def recorded(n_records: int) -> list[TrialRecord]:
    """What a search begins with, then configs at random."""
    records: list[TrialRecord] = []
    while isinstance(step := next_step(SPEC, FACTS, tuple(records), 30.0 * len(records)), Measure):
        records.append(record(len(records), step.config, step.role))
    tried = {key(one.config) for one in records}
    untried = [config for config in candidates(SPEC, FACTS) if key(config) not in tried]
    for config in random.Random(0).sample(untried, n_records - len(records)):
        records.append(record(len(records), config, Role.SEARCH))
    return records


def record(number: int, config: Config, role: Role) -> TrialRecord:
    found = outcome(config)
    value = found.measurement.tokens_per_second if isinstance(found, Measured) else None
    return TrialRecord(
        number=number,
        role=role,
        state=State.PRUNED if value is None else State.COMPLETE,
        config=dict(config),
        value=value,
        value_source=None if value is None else "measured",
        outcome=found,
        seconds=30.0,
    )


def fill(storage: Storage, records: list[TrialRecord]) -> None:
    storage.create(NAME, SPEC, FACTS)
    for one in records:
        storage.open_trial(NAME, config=one.config, role=one.role, fidelity=FULL_DEPTH)
        storage.close_trial(NAME, one)


def measure(storage: Storage, folder: Path) -> list[dict[str, float]]:
    """Milliseconds of each further trial, in all and by whose they are."""
    stop = threading.Event()
    seen: list[dict[str, float]] = []

    def note(event: Event) -> None:
        if isinstance(event, TrialEnded):
            seen.append({"in all": time.perf_counter(), **watch.seconds})
            if len(seen) > N_MORE:
                stop.set()

    with watched() as watch, suppress(Interrupted):
        tune(SPEC, name=NAME, storage=storage, executor=AtOnce(), folder=folder, slots=[(0,)], stop=stop, watch=note)
    found = []
    for before, after in itertools.pairwise(seen[: N_MORE + 1]):
        spent = {name: 1000 * (after[name] - before[name]) for name in after}
        found.append({**spent, "ours": 2 * spent["in all"] - sum(spent.values())})
    return found


def main(n_records: int = N_RECORDS, url: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder, Storage.open(url or f"sqlite:///{folder}/study.db") as storage:
        try:
            fill(storage, recorded(n_records))
            trials = measure(storage, Path(folder, NAME))
        finally:
            storage.delete(NAME)
    print(f"{n_records} recorded trials, {len(candidates(SPEC, FACTS))} configs; ms a trial over {len(trials)} more:")
    for name in trials[0]:
        values = [trial[name] for trial in trials]
        tenths = quantiles(values, n=10)
        print(f"  {name:14}{median(values):8.1f}   (80 % within {tenths[0]:.1f} and {tenths[-1]:.1f})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
