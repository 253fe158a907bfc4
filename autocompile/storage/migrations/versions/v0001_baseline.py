"""The first schema: studies with their lease, and trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "autocompile_studies",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(512), nullable=False, unique=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("used_seconds", sa.Double, nullable=False),
        sa.Column("created", sa.DateTime, nullable=False),
        sa.Column("lease_host", sa.String(255)),
        sa.Column("lease_pid", sa.Integer),
        sa.Column("lease_process_start", sa.BigInteger),
        sa.Column("lease_boot_id", sa.String(64)),
        sa.Column("lease_heartbeat", sa.Double),
    )
    op.create_table(
        "autocompile_trials",
        sa.Column("study_id", sa.Integer, sa.ForeignKey("autocompile_studies.id"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("fidelity", sa.Text, nullable=False),
        sa.Column("stopped", sa.Text),
        sa.Column("value", sa.Double),
        sa.Column("value_source", sa.String(16)),
        sa.Column("outcome", sa.Text),
        sa.Column("seconds", sa.Double),
    )
