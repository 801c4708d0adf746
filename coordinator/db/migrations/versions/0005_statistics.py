"""Statistics that devices report, and runs that only ask for them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("kind", sa.String(length=16), server_default="train", nullable=False))
    op.create_table(
        "statistics",
        sa.Column("run", sa.String(length=36), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=36), nullable=False),
        sa.Column("result", sa.JSON(), nullable=False),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name=op.f("fk_statistics_device_devices")),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_statistics_run_runs")),
        sa.PrimaryKeyConstraint("run", "round", "device", name=op.f("pk_statistics")),
    )
