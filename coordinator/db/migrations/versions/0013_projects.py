"""Projects, their members, and which project each row belongs to. What exists moves into the project `default`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_OWNED = {
    "devices": ["project", "id"],
    "jobs": ["project"],
    "models": ["project"],
    "rollouts": ["project"],
    "runs": ["project", "created_at"],
    "tokens": ["project"],
}
"""Table -> columns of its new index."""


def upgrade() -> None:
    _create_tables()
    for table, columns in _OWNED.items():
        op.add_column(table, _project())
        op.create_index(op.f(f"ix_{table}_project"), table, columns)
    with op.batch_alter_table("serials") as serials:
        serials.add_column(_project())
        serials.drop_constraint("pk_serials", type_="primary")
        serials.create_primary_key("pk_serials", ["project", "serial_number"])
    op.add_column("events", sa.Column("project", sa.String(length=63), nullable=True))
    op.create_index(op.f("ix_events_project"), "events", ["project"])
    op.execute("UPDATE events SET project = 'default'")
    op.add_column("access_tokens", sa.Column("project", sa.String(length=63), nullable=True))
    _move_users()


def _create_tables() -> None:
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("archived_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.create_table(
        "members",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("user", sa.String(length=36), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_members_project_projects")),
        sa.ForeignKeyConstraint(["user"], ["users.id"], name=op.f("fk_members_user_users")),
        sa.PrimaryKeyConstraint("project", "user", name=op.f("pk_members")),
    )
    op.create_index(op.f("ix_members_user"), "members", ["user"])
    op.execute(sa.insert(projects).values(name="default", created_at=sa.func.current_timestamp()))


def _move_users() -> None:
    """Admins and auditors stay so for the whole coordinator; others become members of `default` with the role they had."""
    ordinary = "role NOT IN ('admin', 'auditor')"
    op.execute(f"INSERT INTO members SELECT 'default', id, role FROM users WHERE {ordinary}")
    op.execute(f"UPDATE users SET role = 'member' WHERE {ordinary}")


def _project() -> sa.Column[str]:
    return sa.Column("project", sa.String(length=63), nullable=False, server_default="default")
