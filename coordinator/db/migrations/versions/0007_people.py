"""Users, their sessions and access tokens, and the link that creates the first account."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("password_hash", sa.String(length=200), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("password_changed_at", _TIME, nullable=False),
        sa.Column("disabled_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )
    op.create_table(
        "sessions",
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("user", sa.String(length=36), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("last_used_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(["user"], ["users.id"], name=op.f("fk_sessions_user_users")),
        sa.PrimaryKeyConstraint("secret_sha256", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_user"), "sessions", ["user"])
    op.create_table(
        "access_tokens",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("user", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("parent", sa.String(length=36), nullable=True),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("last_used_at", _TIME, nullable=True),
        sa.Column("revoked_at", _TIME, nullable=True),
        sa.ForeignKeyConstraint(["user"], ["users.id"], name=op.f("fk_access_tokens_user_users")),
        sa.ForeignKeyConstraint(
            ["parent"], ["access_tokens.id"], name=op.f("fk_access_tokens_parent_access_tokens")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_access_tokens")),
        sa.UniqueConstraint("secret_sha256", name=op.f("uq_access_tokens_secret_sha256")),
    )
    op.create_index(op.f("ix_access_tokens_user"), "access_tokens", ["user"])
    op.create_table(
        "setup_links",
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("secret_sha256", name=op.f("pk_setup_links")),
    )
