"""Tables of the model registry.

    models ─► model_versions ─► model_files     blobs, by path; a version never changes
                     │     └──► model_inputs    what it was made from: data and params by hash, runs by id
                     │     └──► model_metrics   figures per stage
                     └─ model_aliases           the version that a name such as `champion` refers to now
                        model_alias_moves       and the versions that it referred to before

Hashes link the versions: an input of relation `params` is the SHA-256 of a file of the parent. The lineage graph therefore
does not depend on the order of registration, and replacing a file breaks the link.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    String,
    Table,
)

from coordinator.db.tables import ROW_ID, UTCDateTime, metadata

models = Table(
    "models",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("latest", Integer, nullable=False),  # number of the newest version; numbers are never reused
    Column("created_at", UTCDateTime, nullable=False),
)

model_versions = Table(
    "model_versions",
    metadata,
    Column("model", String(63), ForeignKey("models.name"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),  # params | compressed | inference | weights | tflite | onnx
    Column("stage", String(16), nullable=False),  # pretrain | run | compress | release | import
    Column("content_sha256", String(64), nullable=False),  # of paths and hashes of all files
    Column("about", JSON, nullable=False),  # architecture, options, configuration
    Column("created_at", UTCDateTime, nullable=False),
    Index("ix_model_versions_content", "model", "content_sha256", unique=True),
)

model_files = Table(
    "model_files",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("path", String(300), primary_key=True),
    Column("sha256", String(64), nullable=False, index=True),
    Column("size_bytes", BigInteger, nullable=False),
    ForeignKeyConstraint(["model", "number"], ["model_versions.model", "model_versions.number"]),
)

model_inputs = Table(
    "model_inputs",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("relation", String(16), primary_key=True),
    Column("ref", String(64), primary_key=True),
    ForeignKeyConstraint(["model", "number"], ["model_versions.model", "model_versions.number"]),
    Index("ix_model_inputs_ref", "ref"),
)

model_metrics = Table(
    "model_metrics",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("stage", String(40), primary_key=True),
    Column("figures", JSON, nullable=False),  # name -> number
    Column("recorded_at", UTCDateTime, nullable=False),
    ForeignKeyConstraint(["model", "number"], ["model_versions.model", "model_versions.number"]),
)

model_aliases = Table(
    "model_aliases",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("alias", String(63), primary_key=True),
    Column("number", Integer, nullable=False),
    Column("moved_at", UTCDateTime, nullable=False),
    ForeignKeyConstraint(["model", "number"], ["model_versions.model", "model_versions.number"]),
)

model_alias_moves = Table(
    "model_alias_moves",
    metadata,
    Column("id", ROW_ID, primary_key=True, autoincrement=True),  # in order of commit
    Column("model", String(63), ForeignKey("models.name"), nullable=False),
    Column("alias", String(63), nullable=False),
    Column("before", Integer, nullable=True),
    Column("number", Integer, nullable=True),  # null: the alias was removed
    Column("moved_at", UTCDateTime, nullable=False),
    Index("ix_model_alias_moves_alias", "model", "alias"),
)
