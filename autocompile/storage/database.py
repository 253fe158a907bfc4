"""From a URL to an open database: its engine, its complaints as one line, and one process at a time setting it up.

SQLite runs in WAL mode; PostgreSQL connections are tried before each use. A lock that another process holds, or a
server that is started again, is waited for: see `Patience`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa

from autocompile.errors import MachineError, UserError
from autocompile.storage.mounts import network_file_system

WAIT_SECONDS = 60.0
CONNECT_SECONDS = 10
_RETRY_SECONDS = 0.25
_SETUP_LOCK = 0x6175746F  # any number that no other program on the server is likely to lock
_DRIVERS = ("pysqlite", "psycopg", "psycopg2")


class Dropped(MachineError):
    """The server went away in mid-transaction; nobody knows whether it was committed."""


class Patience:
    """How long a lock, or a server that is away, is waited for. Whoever waited in vain once does not wait again: all
    that is left to do then is to say so and to end."""

    def __init__(self, url: sa.URL) -> None:
        self._shown = show(url)
        self._file = Path(str(url.database)) if url.get_backend_name() == "sqlite" else None
        self.seconds = wait_seconds(url) if url.get_backend_name() == "sqlite" else 0.0  # a server must be there first

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """A database that cannot be reached, read or written is the machine's failure, in one line."""
        try:
            yield
        except (sa.exc.DBAPIError, optuna.exceptions.StorageInternalError) as error:
            said = _said(error)
            if isinstance(said, sa.exc.DBAPIError) and not _blames_machine(said):
                raise
            message = f"storage {self._shown}: {reason(error)}{self._read_only()}"
            if isinstance(said, sa.exc.DBAPIError) and said.connection_invalidated:
                raise Dropped(message) from error
            self.seconds = 0.0
            raise MachineError(message) from error

    def _read_only(self) -> str:
        """SQLite's own words do not tell a read-only disk from a missing folder."""
        folder = self._file.resolve().parent if self._file else None
        return f" ({folder} cannot be written)" if folder and not os.access(folder, os.W_OK) else ""


def parse(text: str) -> sa.URL:
    """The URL of a database we can use; UserError otherwise."""
    wanted = "expected sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
    try:
        url = sa.make_url(text)
        driver = url.get_driver_name()
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ValueError) as error:
        raise UserError(f'storage: {wanted}, found "{text}"') from error
    if driver not in _DRIVERS:
        raise UserError(f'storage: {wanted}, found "{show(url)}"')
    if driver == "pysqlite" and (url.database in (None, "", ":memory:") or str(url.database).startswith("file:")):
        raise UserError(f'storage: a study is kept in a file: {wanted}, found "{show(url)}"')
    return url


def show(url: sa.URL) -> str:
    return url.render_as_string(hide_password=True)


def exists(text: str) -> bool:
    """Whether there is something to read: False where this is a SQLite file that nobody has made yet."""
    url = parse(text)
    return url.get_backend_name() != "sqlite" or Path(str(url.database)).exists()


def engine_options(url: sa.URL) -> dict[str, Any]:
    """For `sqlalchemy.create_engine`; ours and Optuna's engine take the same."""
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": wait_seconds(url)}}
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": CONNECT_SECONDS}}


def wait_seconds(url: sa.URL) -> float:
    """A minute, or as ``?timeout=`` in the URL of a SQLite file says."""
    asked = url.query.get("timeout", WAIT_SECONDS)
    try:
        return float(str(asked))
    except ValueError as error:
        raise UserError(f'storage: timeout: expected a number of seconds, found "{asked}"') from error


def be_patient(engine: sa.Engine, patience: Patience) -> None:
    """Let this engine's connections wait as long as that says, whenever they are asked."""
    if engine.dialect.name == "sqlite":

        @sa.event.listens_for(engine, "checkout")
        def set_timeout(connection: Any, record: Any, proxy: Any) -> None:
            connection.execute(f"PRAGMA busy_timeout={1000 * patience.seconds:.0f}")

        return

    @sa.event.listens_for(engine, "do_connect")
    def connect(dialect: Any, record: Any, args: list[Any], options: dict[str, Any]) -> Any:
        deadline = time.monotonic() + patience.seconds
        while True:
            try:
                return dialect.connect(*args, **options)
            except dialect.loaded_dbapi.OperationalError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_SECONDS)


def make_engine(url: sa.URL) -> sa.Engine:
    """An engine that has not connected yet; the folder of a SQLite file is made."""
    if url.get_backend_name() == "sqlite":
        _local_folder(url)
    try:
        engine = sa.create_engine(url, **engine_options(url))
    except ImportError as error:
        raise MachineError(
            f"storage {show(url)}: the database driver {error.name} is not installed; pip install {error.name}"
        ) from error
    if url.get_backend_name() == "sqlite":
        sa.event.listen(engine, "connect", _own_transactions)
        sa.event.listen(engine, "begin", _begin)
    return engine


def for_writing(engine: sa.Engine) -> sa.Engine:
    """The same engine, whose SQLite transactions take the write lock at once: one that reads first and then writes
    fails without waiting when another process wrote in between."""
    return engine.execution_options(begin="BEGIN IMMEDIATE")


def reason(error: BaseException) -> str:
    """The first line of what the driver said."""
    said = _said(error)
    origin = said.orig if isinstance(said, sa.exc.DBAPIError) and said.orig else said
    return str(origin or error).strip().split("\n")[0]


def _said(error: BaseException) -> BaseException | None:
    """SQLAlchemy's error, which Optuna wraps."""
    return error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error


def _blames_machine(error: sa.exc.DBAPIError) -> bool:
    """Not where we asked for nonsense. SQLite reports a damaged file as a plain DatabaseError."""
    kinds = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError)
    return isinstance(error, kinds) or type(error) is sa.exc.DatabaseError


@contextmanager
def one_at_a_time(engine: sa.Engine) -> Iterator[None]:
    """Of all processes on this database only one is in here: neither we nor Optuna may make the same table twice."""
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SETUP_LOCK)))
            yield
        return
    # The folder, since closing any handle of the file itself would drop SQLite's own locks on it.
    folder = os.open(Path(str(engine.url.database)).parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _local_folder(url: sa.URL) -> None:
    folder = Path(str(url.database)).resolve().parent
    mounts = Path("/proc/mounts")
    kind = network_file_system(folder, mounts.read_text()) if mounts.exists() else None
    if kind:
        raise UserError(
            f"storage {show(url)}: {folder} is on a network file system ({kind}), which damages SQLite files; "
            "give --storage a file on a local disk or a PostgreSQL database"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"storage {show(url)}: cannot make {folder}: {error.strerror}") from error


def _own_transactions(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # sqlite3 would begin only before INSERT and its like, never before DDL
    connection.execute("PRAGMA journal_mode=WAL")


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
