"""Devices may be relays, or belong to one; an update that a relay keeps has its figures here."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("tokens", "devices"):
        op.add_column(table, sa.Column("relay", sa.String(36), nullable=True))
        op.add_column(table, sa.Column("relay_names", sa.JSON(), nullable=True))
    op.add_column("tasks", sa.Column("result", sa.String(64), nullable=True))
    op.add_column("updates", sa.Column("figures", sa.JSON(), nullable=True))
