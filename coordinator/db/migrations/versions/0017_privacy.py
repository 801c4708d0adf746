"""What runs and devices have spent of differential privacy."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "privacy_ledgers",
        sa.Column("run", sa.String(36), nullable=False),
        sa.Column("mechanism", sa.JSON(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("epsilon", sa.Float(), nullable=False),
        sa.Column("charged_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("released", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_privacy_ledgers_run_runs"),
        sa.PrimaryKeyConstraint("run", name="pk_privacy_ledgers"),
    )
    op.create_table(
        "privacy_spending",
        sa.Column("run", sa.String(36), nullable=False),
        sa.Column("device", sa.String(36), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("first_round", sa.Integer(), nullable=False),
        sa.Column("last_round", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_privacy_spending_run_runs"),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name="fk_privacy_spending_device_devices"),
        sa.PrimaryKeyConstraint("run", "device", name="pk_privacy_spending"),
    )
    op.create_index("ix_privacy_spending_device", "privacy_spending", ["device"])
