"""Tasks know the round that their answer counts for. In a synchronous run that is their own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tasks", sa.Column("counted_in", sa.Integer(), nullable=True))
    op.execute("UPDATE tasks SET counted_in = round WHERE state = 'accepted'")
    op.create_index("ix_tasks_counted", "tasks", ["run", "counted_in"])
