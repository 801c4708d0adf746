"""Tables of rollouts: phases, members and how they stand, and which directions are signed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("phase", sa.Integer(), nullable=False),
        sa.Column("keep", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("salt", sa.String(length=32), nullable=False),
        sa.Column("filter", sa.JSON(), nullable=False),
        sa.Column("gates", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint("number", name=op.f("uq_rollouts_number")),
    )
    op.create_index(op.f("ix_rollouts_model"), "rollouts", ["model"], unique=False)
    op.create_index(op.f("ix_rollouts_state"), "rollouts", ["state"], unique=False)
    op.create_table(
        "rollout_phases",
        sa.Column("rollout", sa.String(length=36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("percent", sa.Float(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("passed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["rollout"], ["rollouts.id"], name=op.f("fk_rollout_phases_rollout_rollouts")
        ),
        sa.PrimaryKeyConstraint("rollout", "number", name=op.f("pk_rollout_phases")),
    )
    op.create_table(
        "rollout_members",
        sa.Column("rollout", sa.String(length=36), nullable=False),
        sa.Column("device", sa.String(length=36), nullable=False),
        sa.Column("phase", sa.Integer(), nullable=False),
        sa.Column("standing", sa.String(length=16), nullable=False),
        sa.Column("told", sa.String(length=16), nullable=True),
        sa.Column("previous", sa.Integer(), nullable=True),
        sa.Column("force", sa.Boolean(), nullable=False),
        sa.Column("code", sa.String(length=40), nullable=True),
        sa.Column("words", sa.Text(), nullable=True),
        sa.Column("golden_accuracy", sa.Float(), nullable=True),
        sa.Column("labels", sa.Float(), nullable=True),
        sa.Column("correct", sa.Float(), nullable=True),
        sa.Column("loss_sum", sa.Float(), nullable=True),
        sa.Column("champion_correct", sa.Float(), nullable=True),
        sa.Column("champion_loss_sum", sa.Float(), nullable=True),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name=op.f("fk_rollout_members_device_devices")),
        sa.ForeignKeyConstraint(
            ["rollout"], ["rollouts.id"], name=op.f("fk_rollout_members_rollout_rollouts")
        ),
        sa.PrimaryKeyConstraint("rollout", "device", name=op.f("pk_rollout_members")),
    )
    op.create_index(op.f("ix_rollout_members_device"), "rollout_members", ["device"], unique=False)
    op.create_table(
        "rollout_directions",
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("signed", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_rollout_directions")),
    )
