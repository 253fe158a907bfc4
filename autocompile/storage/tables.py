"""Our two tables, beside Optuna's in the same database; `migrations` makes them, a test compares the two."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa


class Document(sa.types.TypeDecorator[Any]):
    """JSON as text: PostgreSQL's JSON type refuses NaN, and a loss that diverged is one."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        return None if value is None else json.loads(value)


METADATA = sa.MetaData()

STUDIES = sa.Table(
    "autocompile_studies",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(512), nullable=False, unique=True),
    sa.Column("spec", Document, nullable=False),
    sa.Column("facts", Document, nullable=False),
    sa.Column("used_seconds", sa.Double, nullable=False),
    sa.Column("created", sa.DateTime, nullable=False),  # UTC
    sa.Column("lease_host", sa.String(255)),
    sa.Column("lease_pid", sa.Integer),
    sa.Column("lease_process_start", sa.BigInteger),
    sa.Column("lease_boot_id", sa.String(64)),
    sa.Column("lease_heartbeat", sa.Double),  # seconds since 1970
)

TRIALS = sa.Table(
    "autocompile_trials",
    METADATA,
    sa.Column("study_id", sa.Integer, sa.ForeignKey("autocompile_studies.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # Optuna's trial number
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("config", Document, nullable=False),
    sa.Column("fidelity", Document, nullable=False),
    sa.Column("stopped", Document),
    sa.Column("value", sa.Double),
    sa.Column("value_source", sa.String(16)),
    sa.Column("outcome", Document),
    sa.Column("seconds", sa.Double),
)
