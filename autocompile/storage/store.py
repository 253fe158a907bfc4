"""Studies and trials in one database: our tables say what is so, Optuna's rows are derived from them.

Every write is one transaction, ours before Optuna's, so that a kill at any moment leaves something `mend` completes.
Only the process that holds a study writes its trials; anyone may read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import optuna
import sqlalchemy as sa

from autocompile.errors import MachineError, UserError
from autocompile.records import State, TrialRecord
from autocompile.space import Config
from autocompile.spec import Budget, Facts, Fidelity, Role, StudySpec
from autocompile.storage import database
from autocompile.storage.lease import Holder, is_live, process_start, this_process
from autocompile.storage.optuna_rows import OptunaRows, new_trial
from autocompile.storage.schema import migrate
from autocompile.storage.tables import STUDIES, TRIALS
from autocompile.values import Value, nearest


class StoredStudy(Value):
    """A study as it is kept; ``spec`` has the newest budget and never a planned run."""

    name: str
    spec: StudySpec
    facts: Facts
    used_seconds: float
    created: datetime


class Storage:
    """An open database. Use as a context manager, from one thread."""

    def __init__(self, engine: sa.Engine, rows: OptunaRows) -> None:
        self._engine = engine
        self._rows = rows
        self._shown = database.show(engine.url)

    @classmethod
    def open(cls, url: str) -> Self:
        """Connect, and make or migrate the tables. UserError or MachineError, in one line, if that cannot be."""
        parsed = database.parse(url)
        shown = database.show(parsed)
        engine = database.make_engine(parsed)
        rows = None
        try:
            with database.reaching(shown), database.one_at_a_time(engine):
                with database.for_writing(engine).begin() as connection:
                    migrate(connection, shown)
                rows = OptunaRows(parsed)
                rows.check_version()
        except BaseException as error:
            if rows:
                rows.close()
            engine.dispose()
            if isinstance(error, sa.exc.DBAPIError):  # no database file, or no right to make tables
                raise MachineError(f"storage {shown}: {database.reason(error)}") from error
            raise
        return cls(engine, rows)

    def close(self) -> None:
        self._rows.close()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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

    def load(self, name: str) -> StoredStudy | None:
        wanted = (STUDIES.c.name, STUDIES.c.spec, STUDIES.c.facts, STUDIES.c.used_seconds, STUDIES.c.created)
        with self._reading() as connection:
            row = connection.execute(sa.select(*wanted).where(STUDIES.c.name == name)).mappings().one_or_none()
        if row is None:
            return None
        return StoredStudy.model_validate({**row, "created": row["created"].replace(tzinfo=UTC)})

    def records(self, name: str) -> list[TrialRecord]:
        """Every slice of the study, in order of their numbers."""
        with self._reading() as connection:
            study = self._study_id(connection, name)
            rows = connection.execute(sa.select(TRIALS).where(TRIALS.c.study_id == study).order_by(TRIALS.c.number))
            return [_record(row) for row in rows.mappings()]

    def open_trial(self, name: str, *, config: Config, role: Role, fidelity: Fidelity) -> int:
        """A running trial; its number."""
        number = self._rows.open_trial(name, new_trial(self._load(name).spec, config, role))
        record = TrialRecord(number=number, role=role, state=State.RUNNING, config=dict(config), fidelity=fidelity)
        with self._writing() as connection:
            study = self._study_id(connection, name)
            connection.execute(sa.insert(TRIALS).values(study_id=study, **record.model_dump(mode="json")))
        return number

    def close_trial(self, name: str, record: TrialRecord) -> None:
        """Keep the outcome, then tell Optuna. Harmless when repeated: what was kept first stays."""
        with self._writing() as connection:
            this = (TRIALS.c.study_id == self._study_id(connection, name)) & (TRIALS.c.number == record.number)
            running = this & (TRIALS.c.state == State.RUNNING.value)
            connection.execute(sa.update(TRIALS).where(running).values(record.model_dump(mode="json")))
            kept = _record(connection.execute(sa.select(TRIALS).where(this)).mappings().one())
        self._rows.tell(name, kept)

    def mend(self, name: str) -> None:
        """Bring Optuna's rows in line with ours after a kill. Hold the study first."""
        self._rows.mend(name, self._load(name).spec, self.records(name))

    def add_seconds(self, name: str, seconds: float) -> None:
        with self._writing() as connection:
            used = {"used_seconds": STUDIES.c.used_seconds + seconds}
            connection.execute(sa.update(STUDIES).where(STUDIES.c.name == name).values(used))

    def set_budget(self, name: str, budget: Budget) -> None:
        """The budget of the newest run, which a later one without a budget of its own continues with."""
        with self._writing() as connection:
            this = STUDIES.c.id == self._study_id(connection, name)
            spec = StudySpec.model_validate(connection.scalars(sa.select(STUDIES.c.spec).where(this)).one())
            changed = _stored(spec.model_copy(update={"budget": budget}))
            connection.execute(sa.update(STUDIES).where(this).values(spec=changed))

    def delete(self, name: str) -> None:
        """The study with its trials, here and in Optuna's tables; UserError while somebody holds it."""
        with self.hold(name):
            self._rows.delete(name)  # first, since a row of Optuna's alone would block the name for ever
            with self._writing() as connection:
                study = self._study_id(connection, name)
                connection.execute(sa.delete(TRIALS).where(TRIALS.c.study_id == study))
                connection.execute(sa.delete(STUDIES).where(STUDIES.c.id == study))

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Be the study's only writer meanwhile; UserError if another live process is."""
        here = this_process()
        with self._writing() as connection:
            this = STUDIES.c.id == self._study_id(connection, name)
            row = connection.execute(sa.select(STUDIES).where(this).with_for_update()).mappings().one()
            _refuse_if_held(row, here)
            connection.execute(sa.update(STUDIES).where(this).values(_lease(here)))
        try:
            yield
        finally:
            with self._writing() as connection:
                nobody = dict.fromkeys(_lease(here))
                connection.execute(sa.update(STUDIES).where(_held_by(name, here)).values(nobody))

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
        with database.reaching(self._shown), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with database.reaching(self._shown), database.for_writing(self._engine).begin() as connection:
            yield connection

    def _load(self, name: str) -> StoredStudy:
        if study := self.load(name):
            return study
        raise self._unknown(name)

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


def _refuse_if_held(row: sa.RowMapping, here: Holder) -> None:
    if row["lease_pid"] is None:
        return
    holder = Holder.model_validate({field: row[f"lease_{field}"] for field in Holder.model_fields})
    silent_seconds = time.time() - row["lease_heartbeat"]
    if is_live(holder, silent_seconds=silent_seconds, here=here, start=process_start(holder.pid)):
        raise UserError(f"study {row['name']} is in use by pid {holder.pid} on {holder.host}")
