"""Studies and trials in one database: our tables say what is so, Optuna's rows are derived from them.

Every write is one transaction, ours before Optuna's, so that a kill at any moment leaves something `mend` completes.
Only the process that holds a study writes its trials; anyone may read. A lock on SQLite's file, and a PostgreSQL
server that is started again, are waited for up to a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import optuna
import sqlalchemy as sa

from autocompile.errors import MachineError, UserError
from autocompile.records import State, TrialRecord
from autocompile.space import Config
from autocompile.spec import Budget, Facts, Fidelity, Role, StudySpec
from autocompile.storage import database
from autocompile.storage.lease import WATCH_SECONDS, Holder, is_live, process_start, this_process
from autocompile.storage.optuna_rows import OptunaRows, new_trial
from autocompile.storage.schema import migrate
from autocompile.storage.tables import STUDIES, TRIALS
from autocompile.values import Value, nearest

_RETRY_SECONDS = 0.05

P = ParamSpec("P")
T = TypeVar("T")


class StoredStudy(Value):
    """A study as it is kept; ``spec`` has the newest budget and never a planned run."""

    name: str
    spec: StudySpec
    facts: Facts
    used_seconds: float
    created: datetime


def _kept(act: Callable[[], T], repair: Callable[[], object] = lambda: None) -> T:
    """What ``act`` returns, once it is through: a server may go away in mid-transaction, which no ping before it sees.

    It may have kept what was written or not, so that ``act`` has to be harmless when repeated, after ``repair``.
    """
    deadline = time.monotonic() + database.WAIT_SECONDS
    while True:
        try:
            return act()
        except database.Dropped:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)
        repair()


def _again(method: Callable[P, T]) -> Callable[P, T]:
    """A method that goes on when the server comes back."""

    @wraps(method)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> T:
        return _kept(lambda: method(*args, **kwargs))

    return repeated


class Storage:
    """An open database. Use as a context manager, from one thread."""

    def __init__(
        self, engine: sa.Engine, rows: OptunaRows, *, patience: database.Patience, watch_seconds: float
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._patience = patience
        self._watch_seconds = watch_seconds
        self._specs: dict[str, StudySpec] = {}
        self._shown = database.show(engine.url)

    @classmethod
    def open(cls, url: str, *, watch_seconds: float = WATCH_SECONDS) -> Self:
        """Connect, and make or migrate the tables. UserError or MachineError, in one line, if that cannot be.

        ``watch_seconds``: how long a holder is watched whom only its heartbeat can show to be alive, see `hold`.
        """
        parsed = database.parse(url)
        shown = database.show(parsed)
        patience = database.Patience(parsed)
        engine = database.make_engine(parsed)
        database.be_patient(engine, patience)
        rows = None
        try:
            with patience.reaching(), database.one_at_a_time(engine):
                with database.for_writing(engine).begin() as connection:
                    migrate(connection, shown)
                rows = OptunaRows(parsed, patience)
                rows.check_version()
        except BaseException as error:
            if rows:
                rows.close()
            engine.dispose()
            if isinstance(error, sa.exc.DBAPIError):  # no database file, or no right to make tables
                raise MachineError(f"storage {shown}: {database.reason(error)}") from error
            raise
        patience.seconds = database.wait_seconds(parsed)
        return cls(engine, rows, patience=patience, watch_seconds=watch_seconds)

    def close(self) -> None:
        self._rows.close()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @_again
    def names(self) -> list[str]:
        """Of all studies, oldest first."""
        with self._reading() as connection:
            return list(connection.scalars(sa.select(STUDIES.c.name).order_by(STUDIES.c.id)))

    def create(self, name: str, spec: StudySpec, facts: Facts) -> None:
        """UserError if there is a study of this name, also where another process made it this very moment."""
        row = {
            "name": name,
            "spec": _stored(spec),
            "facts": facts.model_dump(mode="json"),
            "used_seconds": 0.0,
            "created": datetime.now(UTC).replace(tzinfo=None),
        }
        try:
            with self._writing() as connection:
                connection.execute(sa.insert(STUDIES).values(row))
        except sa.exc.IntegrityError as error:
            raise UserError(f"study {name} exists already in {self._shown}") from error
        try:
            self._rows.create(name)
        except optuna.exceptions.DuplicatedStudyError as error:
            with self._writing() as connection:
                connection.execute(sa.delete(STUDIES).where(STUDIES.c.name == name))
            raise UserError(f"a study {name} that is not of autocompile exists in {self._shown}") from error

    @_again
    def load(self, name: str) -> StoredStudy | None:
        wanted = (STUDIES.c.name, STUDIES.c.spec, STUDIES.c.facts, STUDIES.c.used_seconds, STUDIES.c.created)
        with self._reading() as connection:
            row = connection.execute(sa.select(*wanted).where(STUDIES.c.name == name)).mappings().one_or_none()
        if row is None:
            return None
        return StoredStudy.model_validate({**row, "created": row["created"].replace(tzinfo=UTC)})

    @_again
    def records(self, name: str) -> list[TrialRecord]:
        """Every slice of the study, in order of their numbers."""
        with self._reading() as connection:
            study = self._study_id(connection, name)
            rows = connection.execute(sa.select(TRIALS).where(TRIALS.c.study_id == study).order_by(TRIALS.c.number))
            return [_record(row) for row in rows.mappings()]

    def open_trial(self, name: str, *, config: Config, role: Role, fidelity: Fidelity) -> int:
        """A running trial; its number."""
        trial = new_trial(self._searched(name), config, role)
        # Mended, so that a row which was kept after all does not stay open.
        number = _kept(lambda: self._rows.open_trial(name, trial), repair=lambda: self.mend(name))
        record = TrialRecord(number=number, role=role, state=State.RUNNING, config=dict(config), fidelity=fidelity)
        self._add(name, record)
        return number

    @_again
    def _add(self, name: str, record: TrialRecord) -> None:
        with self._writing() as connection:
            study = self._study_id(connection, name)
            this = (TRIALS.c.study_id == study) & (TRIALS.c.number == record.number)
            if connection.execute(sa.select(TRIALS.c.number).where(this)).one_or_none() is None:
                connection.execute(sa.insert(TRIALS).values(study_id=study, **record.model_dump(mode="json")))

    @_again
    def close_trial(self, name: str, record: TrialRecord) -> None:
        """Keep the outcome, then tell Optuna. Harmless when repeated: what was kept first stays."""
        with self._writing() as connection:
            this = (TRIALS.c.study_id == self._study_id(connection, name)) & (TRIALS.c.number == record.number)
            running = this & (TRIALS.c.state == State.RUNNING.value)
            connection.execute(sa.update(TRIALS).where(running).values(record.model_dump(mode="json")))
            kept = _record(connection.execute(sa.select(TRIALS).where(this)).mappings().one())
        self._rows.tell(name, kept)

    @_again
    def mend(self, name: str) -> None:
        """Bring Optuna's rows in line with ours after a kill. Hold the study first."""
        self._rows.mend(name, self._load(name).spec, self.records(name))

    @_again
    def add_seconds(self, name: str, seconds: float) -> None:
        with self._writing() as connection:
            used = {"used_seconds": STUDIES.c.used_seconds + seconds}
            connection.execute(sa.update(STUDIES).where(STUDIES.c.name == name).values(used))

    @_again
    def set_budget(self, name: str, budget: Budget) -> None:
        """The budget of the newest run, which a later one without a budget of its own continues with."""
        with self._writing() as connection:
            changed = _stored(self._spec(connection, name).model_copy(update={"budget": budget}))
            connection.execute(sa.update(STUDIES).where(STUDIES.c.name == name).values(spec=changed))

    def delete(self, name: str) -> None:
        """The study with its trials, here and in Optuna's tables; UserError while somebody holds it."""
        with self.hold(name):
            self._specs.pop(name, None)
            self._rows.delete(name)  # first, since a row of Optuna's alone would block the name for ever
            with self._writing() as connection:
                study = self._study_id(connection, name)
                connection.execute(sa.delete(TRIALS).where(TRIALS.c.study_id == study))
                connection.execute(sa.delete(STUDIES).where(STUDIES.c.id == study))

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Be the study's only writer meanwhile; UserError if another live process is.

        A holder of whom we see nothing but a heartbeat, and that an old one or one from the future, is watched for a
        while first: clocks jump, and only a heartbeat that stands still is a dead one's.
        """
        here = this_process()
        heartbeat = self._take(name, here, watched=None)
        if heartbeat is not None:
            time.sleep(self._watch_seconds)
            self._take(name, here, watched=heartbeat)
        try:
            yield
        finally:
            self._release(name, here)

    def _take(self, name: str, here: Holder, *, watched: float | None) -> float | None:
        """Take the lease; or, if its holder has to be watched first, its heartbeat. ``watched`` is that heartbeat."""
        with self._writing() as connection:
            this = STUDIES.c.id == self._study_id(connection, name)
            row = connection.execute(sa.select(STUDIES).where(this).with_for_update()).mappings().one()
            heartbeat = row["lease_heartbeat"]
            live = row["lease_pid"] is not None and _is_live(row, here)
            if live is None and watched is None:
                return float(heartbeat)
            if live or (live is None and heartbeat != watched):
                raise UserError(f"study {name} is in use by pid {row['lease_pid']} on {row['lease_host']}")
            connection.execute(sa.update(STUDIES).where(this).values(_lease(here)))
        return None

    @_again
    def _release(self, name: str, here: Holder) -> None:
        with self._writing() as connection:
            nobody = dict.fromkeys(_lease(here))
            connection.execute(sa.update(STUDIES).where(_held_by(name, here)).values(nobody))

    @_again
    def beat(self, name: str) -> None:
        """Say that the holder lives, at least every 30 s; UserError if the study was taken over meanwhile."""
        here = this_process()
        with self._writing() as connection:
            result = connection.execute(sa.update(STUDIES).where(_held_by(name, here)).values(_lease(here)))
            if result.rowcount == 0:
                row = connection.execute(sa.select(STUDIES).where(STUDIES.c.name == name)).mappings().one_or_none()
                taker = f"pid {row['lease_pid']} on {row['lease_host']}" if row else "a process that deleted it"
                raise UserError(f"study {name} was taken over by {taker}")

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._patience.reaching(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with self._patience.reaching(), database.for_writing(self._engine).begin() as connection:
            yield connection

    def _load(self, name: str) -> StoredStudy:
        if study := self.load(name):
            return study
        raise self._unknown(name)

    @_again
    def _searched(self, name: str) -> StudySpec:
        """A spec with the study's space and pins, which never change."""
        with self._writing() as connection:  # a locked file is noticed here: Optuna would wait for it five times
            if name not in self._specs:
                self._specs[name] = self._spec(connection, name)
        return self._specs[name]

    def _spec(self, connection: sa.Connection, name: str) -> StudySpec:
        this = STUDIES.c.id == self._study_id(connection, name)
        return StudySpec.model_validate(connection.scalars(sa.select(STUDIES.c.spec).where(this)).one())

    def _study_id(self, connection: sa.Connection, name: str) -> int:
        found: int | None = connection.scalars(sa.select(STUDIES.c.id).where(STUDIES.c.name == name)).one_or_none()
        if found is None:
            raise self._unknown(name)
        return found

    def _unknown(self, name: str) -> UserError:
        known = self.names()
        return UserError(f"no study {name} in {self._shown}; {nearest(name, known) if known else 'it holds none'}")


def _stored(spec: StudySpec) -> dict[str, Any]:
    """A planned run is no part of a study: it is asked for anew each time."""
    return spec.model_dump(mode="json", exclude={"planned_tokens", "planned_steps"})


def _record(row: sa.RowMapping) -> TrialRecord:
    return TrialRecord.model_validate({name: value for name, value in row.items() if name != "study_id"})


def _lease(holder: Holder) -> dict[str, Any]:
    return {**{f"lease_{name}": value for name, value in holder.model_dump().items()}, "lease_heartbeat": time.time()}


def _held_by(name: str, holder: Holder) -> sa.ColumnElement[bool]:
    same = [STUDIES.c[f"lease_{field}"] == value for field, value in holder.model_dump().items()]
    return sa.and_(STUDIES.c.name == name, *same)


def _is_live(row: sa.RowMapping, here: Holder) -> bool | None:
    holder = Holder.model_validate({field: row[f"lease_{field}"] for field in Holder.model_fields})
    silent_seconds = time.time() - row["lease_heartbeat"]
    return is_live(holder, silent_seconds=silent_seconds, here=here, start=process_start(holder.pid))
