"""Tables of the model registry: models, versions with their files, inputs and metrics, aliases and how they moved."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("latest", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )
    op.create_table(
        "model_alias_moves",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("alias", sa.String(length=63), nullable=False),
        sa.Column("before", sa.Integer(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("moved_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_model_alias_moves_model_models")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_alias_moves")),
    )
    op.create_index("ix_model_alias_moves_alias", "model_alias_moves", ["model", "alias"], unique=False)
    op.create_table(
        "model_versions",
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("content_sha256", sa.String(length=64), nullable=False),
        sa.Column("about", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_model_versions_model_models")),
        sa.PrimaryKeyConstraint("model", "number", name=op.f("pk_model_versions")),
    )
    op.create_index("ix_model_versions_content", "model_versions", ["model", "content_sha256"], unique=True)
    op.create_table(
        "model_aliases",
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("alias", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("moved_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["model", "number"],
            ["model_versions.model", "model_versions.number"],
            name=op.f("fk_model_aliases_model_model_versions"),
        ),
        sa.PrimaryKeyConstraint("model", "alias", name=op.f("pk_model_aliases")),
    )
    op.create_table(
        "model_files",
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(length=300), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model", "number"],
            ["model_versions.model", "model_versions.number"],
            name=op.f("fk_model_files_model_model_versions"),
        ),
        sa.PrimaryKeyConstraint("model", "number", "path", name=op.f("pk_model_files")),
    )
    op.create_index(op.f("ix_model_files_sha256"), "model_files", ["sha256"], unique=False)
    op.create_table(
        "model_inputs",
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("relation", sa.String(length=16), nullable=False),
        sa.Column("ref", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["model", "number"],
            ["model_versions.model", "model_versions.number"],
            name=op.f("fk_model_inputs_model_model_versions"),
        ),
        sa.PrimaryKeyConstraint("model", "number", "relation", "ref", name=op.f("pk_model_inputs")),
    )
    op.create_index("ix_model_inputs_ref", "model_inputs", ["ref"], unique=False)
    op.create_table(
        "model_metrics",
        sa.Column("model", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["model", "number"],
            ["model_versions.model", "model_versions.number"],
            name=op.f("fk_model_metrics_model_model_versions"),
        ),
        sa.PrimaryKeyConstraint("model", "number", "stage", name=op.f("pk_model_metrics")),
    )
