"""Bring our tables to the schema this version knows, with Alembic and a version table of our own."""

from __future__ import annotations

from pathlib import Path

import alembic.command
import sqlalchemy as sa
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from autocompile.errors import UserError

VERSION_TABLE = "autocompile_version"  # Optuna's is Alembic's default, alembic_version


def migrate(connection: sa.Connection, shown: str) -> None:
    """In the caller's transaction, so that a kill leaves the old schema or the new one; harmless when repeated."""
    config = Config()
    folder = str(Path(__file__).parent / "migrations")
    config.set_main_option("script_location", folder.replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    found = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_heads()
    if unknown := set(found) - known:
        raise UserError(
            f"storage {shown}: written by a newer autocompile: expected a schema up to {max(known)}, "
            f"found {', '.join(sorted(unknown))}; upgrade autocompile"
        )
    alembic.command.upgrade(config, "head")
