"""Runs know their best round, and the figures of their final model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("best", sa.JSON(), nullable=True))
    op.add_column("runs", sa.Column("figures", sa.JSON(), nullable=True))
