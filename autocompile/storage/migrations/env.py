"""What Alembic runs to migrate: on the connection it is given, with a version table of our own beside Optuna's."""

from __future__ import annotations

from alembic import context

from autocompile.storage.schema import VERSION_TABLE
from autocompile.storage.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
