"""Tables of the first federation: enrolment, runs, tasks, updates, events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "devices",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("device_group", sa.String(length=200), nullable=False),
        sa.Column("serial_number", sa.String(length=200), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("token", sa.String(length=36), nullable=True),
        sa.Column("key_sha256", sa.String(length=64), nullable=False),
        sa.Column("csr", sa.Text(), nullable=True),
        sa.Column("enrolled_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("certificate_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expected_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
        sa.UniqueConstraint("key_sha256", name=op.f("uq_devices_key_sha256")),
    )
    op.create_index(op.f("ix_devices_device_group"), "devices", ["device_group"], unique=False)
    op.create_table(
        "events",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("event", sa.String(length=60), nullable=False),
        sa.Column("run", sa.String(length=36), nullable=True),
        sa.Column("device", sa.String(length=36), nullable=True),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_device"), "events", ["device"], unique=False)
    op.create_index(op.f("ix_events_run"), "events", ["run"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("experiment", sa.JSON(), nullable=False),
        sa.Column("notices", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("prepared", sa.JSON(), nullable=True),
        sa.Column("params", sa.String(length=64), nullable=True),
        sa.Column("strategy_state", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_state"), "runs", ["state"], unique=False)
    op.create_table(
        "serials",
        sa.Column("serial_number", sa.String(length=200), nullable=False),
        sa.Column("device_group", sa.String(length=200), nullable=False),
        sa.Column("device", sa.String(length=36), nullable=True),
        sa.Column("added_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("serial_number", name=op.f("pk_serials")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("device_group", sa.String(length=200), nullable=False),
        sa.Column("uses_left", sa.Integer(), nullable=False),
        sa.Column("needs_approval", sa.Boolean(), nullable=False),
        sa.Column("listed_serials_only", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("secret_sha256", name=op.f("uq_tokens_secret_sha256")),
    )
    op.create_table(
        "certificates",
        sa.Column("serial", sa.String(length=40), nullable=False),
        sa.Column("device", sa.String(length=36), nullable=False),
        sa.Column("pem", sa.Text(), nullable=False),
        sa.Column("key_sha256", sa.String(length=64), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_after", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name=op.f("fk_certificates_device_devices")),
        sa.PrimaryKeyConstraint("serial", name=op.f("pk_certificates")),
    )
    op.create_index(op.f("ix_certificates_device"), "certificates", ["device"], unique=False)
    op.create_index(op.f("ix_certificates_key_sha256"), "certificates", ["key_sha256"], unique=False)
    op.create_table(
        "evaluations",
        sa.Column("run", sa.String(length=36), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=36), nullable=False),
        sa.Column("result", sa.JSON(), nullable=False),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name=op.f("fk_evaluations_device_devices")),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_evaluations_run_runs")),
        sa.PrimaryKeyConstraint("run", "round", "device", name=op.f("pk_evaluations")),
    )
    op.create_table(
        "rounds",
        sa.Column("run", sa.String(length=36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("base", sa.String(length=64), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
        sa.Column("population", sa.Integer(), nullable=False),
        sa.Column("expected", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("record", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_rounds_run_runs")),
        sa.PrimaryKeyConstraint("run", "number", name=op.f("pk_rounds")),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("run", sa.String(length=36), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=36), nullable=False),
        sa.Column("runtime", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("offer", sa.JSON(), nullable=False),
        sa.Column("leased_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("words", sa.Text(), nullable=True),
        sa.Column("answered_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name=op.f("fk_tasks_device_devices")),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_tasks_run_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
    )
    op.create_index("ix_tasks_device_state", "tasks", ["device", "state"], unique=False)
    op.create_index("ix_tasks_once", "tasks", ["run", "round", "kind", "device"], unique=True)
    op.create_table(
        "updates",
        sa.Column("run", sa.String(length=36), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=36), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("blob", sa.String(length=64), nullable=False),
        sa.Column("sent_sha256", sa.String(length=64), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.id"], name=op.f("fk_updates_device_devices")),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_updates_run_runs")),
        sa.PrimaryKeyConstraint("run", "round", "device", name=op.f("pk_updates")),
    )
    op.create_table(
        "uploads",
        sa.Column("task", sa.String(length=36), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("decoded_bytes", sa.BigInteger(), nullable=False),
        sa.Column("encoding", sa.String(length=16), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_uploads_task_tasks")),
        sa.PrimaryKeyConstraint("task", name=op.f("pk_uploads")),
    )
