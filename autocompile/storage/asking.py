"""Ask a database whether it answers, quickly and without making or changing anything in it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import sqlalchemy as sa

from autocompile.errors import MachineError, UserError
from autocompile.storage import database
from autocompile.storage.mounts import network_file_system
from autocompile.storage.tables import STUDIES

_SECONDS = 5


def ask(text: str) -> str:
    """What is there, in one line. UserError for a URL we cannot use, MachineError with what to do for a database."""
    url = database.parse(text)
    shown = database.show(url)
    if url.get_backend_name() == "sqlite":
        file = Path(str(url.database)).absolute()
        _check_folder(next(path for path in file.parents if path.exists()), shown)
        if not file.exists():
            return f"{shown}, which the first study will make"
    options = {"timeout": _SECONDS} if url.get_backend_name() == "sqlite" else {"connect_timeout": _SECONDS}
    try:
        engine = sa.create_engine(url.difference_update_query(["timeout"]), connect_args=options, poolclass=sa.NullPool)
    except ImportError as error:
        raise MachineError(f"storage {shown}: the driver {error.name} is not installed: pip install psycopg") from error
    try:
        return f"{shown}, {_studies(engine)}"
    except sa.exc.DBAPIError as error:
        raise MachineError(f"storage {shown}: {database.reason(error)}: {_cure(url, error)}") from error


def _studies(engine: sa.Engine) -> str:
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # which a lock of somebody else prevents
        found = sa.inspect(connection).has_table(STUDIES.name)
        count = connection.scalar(sa.select(sa.func.count()).select_from(STUDIES)) if found else 0
        connection.rollback()
    return f"{count} studies" if found else "without any study yet"


def _check_folder(near: Path, shown: str) -> None:
    if not near.is_dir():
        raise MachineError(f"storage {shown}: {near} is a file: move it away or give another --storage")
    mounts = Path("/proc/mounts")
    kind = network_file_system(near, mounts.read_text()) if mounts.exists() else None
    if kind:
        raise UserError(f"storage {shown}: {near} is on a network file system ({kind}): give --storage a local file")
    try:
        with tempfile.TemporaryFile(dir=near):
            pass
    except OSError as error:
        raise MachineError(
            f"storage {shown}: {near} cannot be written ({error.strerror}): give another --storage"
        ) from error


def _cure(url: sa.URL, error: sa.exc.DBAPIError) -> str:
    said = str(error.orig)
    if url.get_backend_name() != "sqlite":
        return "start the server, or mend host, port, user and database in --storage"
    if "locked" in said:
        return f"another program holds it: end that one (fuser {url.database} names it)"
    if "not a database" in said or "malformed" in said:
        return f"move {url.database} away, or give another --storage"
    return "mend its rights and its disk, or give another --storage"
