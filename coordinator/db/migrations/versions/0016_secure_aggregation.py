"""Groups of secure aggregation on devices, and the messages of their open rounds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "secure_groups",
        sa.Column("run", sa.String(36), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_secure_groups_run_runs"),
        sa.PrimaryKeyConstraint("run", "round", "number", name="pk_secure_groups"),
    )
    op.create_table(
        "secure_messages",
        sa.Column("task", sa.String(36), nullable=False),
        sa.Column("kind", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("certificate", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name="fk_secure_messages_task_tasks"),
        sa.PrimaryKeyConstraint("task", "kind", name="pk_secure_messages"),
    )
