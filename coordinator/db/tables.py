"""The tables of devices, runs, events and the model registry. Times are UTC; ids are UUIDs as text; JSON is readable by people.

Three constraints carry guarantees: an update is unique by (run, round, device), a committed round by (run, number), a
used serial number by itself within its project. Blobs are files named by SHA-256.

    models ─► model_versions ─► model_files     blobs, by path; a version never changes
                     │     └──► model_inputs    what it was made from: data and params by hash, runs by id
                     │     └──► model_metrics   figures per stage
                     └─ model_aliases           the version that a name such as `champion` refers to now
                        model_alias_moves       and the versions that it referred to before

Hashes link the versions: an input of relation `params` is the SHA-256 of a file of the parent. The lineage graph therefore
does not depend on the order of registration, and replacing a file breaks the link.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    func,
    select,
)

from coordinator.db.project_filter import project_column

RowT = TypeVar("RowT")


class UTCDateTime(TypeDecorator[datetime]):
    """Timezone-aware datetimes in UTC, also on SQLite, which has none."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        return value if value is None or value.tzinfo else value.replace(tzinfo=UTC)


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

LIVE_RUNS = ("queued", "running")
"""States of a run that has not ended."""

ROW_ID = BigInteger().with_variant(Integer, "sqlite")

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("secret_sha256", String(64), nullable=False, unique=True),
    Column("device_group", String(200), nullable=False),
    Column("uses_left", Integer, nullable=False),
    Column("needs_approval", Boolean, nullable=False),
    Column("listed_serials_only", Boolean, nullable=False),
    Column("created_at", UTCDateTime, nullable=False),
    Column("expires_at", UTCDateTime, nullable=False),
    Column("relay", String(36), nullable=True),  # as of the devices that it admits
    Column("relay_names", JSON, nullable=True),
    project_column(),
)

serials = Table(
    "serials",
    metadata,
    project_column(primary_key=True),
    Column("serial_number", String(200), primary_key=True),
    Column("device_group", String(200), nullable=False),
    Column("device", String(36), nullable=True),
    Column("added_at", UTCDateTime, nullable=False),
)

devices = Table(
    "devices",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("device_group", String(200), nullable=False, index=True),
    Column("serial_number", String(200), nullable=True),
    Column("state", String(16), nullable=False),  # pending | active | revoked | left
    Column("token", String(36), nullable=True),
    Column("key_sha256", String(64), nullable=False, unique=True),  # of the key it enrolled with
    Column("csr", Text, nullable=True),  # while pending
    Column("enrolled_at", UTCDateTime, nullable=False),
    Column("certificate_until", UTCDateTime, nullable=True),
    Column("last_seen_at", UTCDateTime, nullable=True),
    Column("expected_at", UTCDateTime, nullable=True),  # time of its next check-in
    Column("report", JSON, nullable=False),  # its last CheckIn
    Column("relay", String(36), nullable=True),  # the relay that it belongs to
    Column("relay_names", JSON, nullable=True),  # of a relay: host names and addresses that it is reached at
    project_column(index=None),
    Index("ix_devices_project", "project", "id"),
)

certificates = Table(
    "certificates",
    metadata,
    Column("serial", String(40), primary_key=True),  # hex
    Column("device", String(36), ForeignKey("devices.id"), nullable=False, index=True),
    Column("pem", Text, nullable=False),
    Column("key_sha256", String(64), nullable=False, index=True),
    Column("not_before", UTCDateTime, nullable=False),
    Column("not_after", UTCDateTime, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("state", String(16), nullable=False, index=True),  # queued|running|finished|failed|cancelled
    Column("experiment", JSON, nullable=False),  # resolved
    Column("notices", JSON, nullable=False),  # settings of the experiment that do not apply to a real fleet
    Column("kind", String(16), nullable=False, server_default="train"),  # train | statistics
    Column("created_at", UTCDateTime, nullable=False),
    Column("finished_at", UTCDateTime, nullable=True),
    Column("error", Text, nullable=True),
    Column("round", Integer, nullable=False),  # last committed; 0 before the first
    Column("prepared", JSON, nullable=True),  # model, artifact, start figures; null until prepared
    Column("params", String(64), nullable=True),  # blobs as of `round`
    Column("strategy_state", String(64), nullable=True),
    Column("best", JSON, nullable=True),  # records.Best; its params are a blob
    Column("figures", JSON, nullable=True),  # of the final model: keys of the report's `final` and `per_site`
    Column("own_model", JSON, nullable=True),  # a user's own model, if it came with the run: files by name
    project_column(index=None),
    Index("ix_runs_project", "project", "created_at"),
)

rounds = Table(
    "rounds",
    metadata,
    Column("run", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("state", String(16), nullable=False),  # open | closed | committed
    Column("base", String(64), nullable=False),
    Column("wanted", Integer, nullable=False),  # accepted updates that close it
    Column("population", Integer, nullable=False),
    Column("expected", JSON, nullable=False),  # relay.expected.Expected
    Column("started_at", UTCDateTime, nullable=False),
    Column("deadline_at", UTCDateTime, nullable=False),
    Column("record", JSON, nullable=True),  # its line of the report, once committed
)

tasks = Table(
    "tasks",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("run", String(36), ForeignKey("runs.id"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("kind", String(16), nullable=False),  # train | evaluate | statistics | fold
    Column("position", Integer, nullable=False),
    Column("device", String(36), ForeignKey("devices.id"), nullable=False),
    Column("runtime", String(16), nullable=False),
    Column(
        "state", String(16), nullable=False
    ),  # waiting|leased|accepted|rejected|declined|expired|cancelled
    Column("offer", JSON, nullable=False),  # wire.device.TaskOffer
    Column("leased_until", UTCDateTime, nullable=True),
    Column("reason", String(40), nullable=True),
    Column("words", Text, nullable=True),
    Column("answered_at", UTCDateTime, nullable=True),
    Column("counted_in", Integer, nullable=True),  # round that its answer counts for, once that is known
    Column("result", String(64), nullable=True),  # blob of what a relay has folded
    Index("ix_tasks_counted", "run", "counted_in"),
    Index("ix_tasks_once", "run", "round", "kind", "device", unique=True),
    Index("ix_tasks_device_state", "device", "state"),
)

uploads = Table(
    "uploads",
    metadata,
    Column("task", String(36), ForeignKey("tasks.id"), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("decoded_bytes", BigInteger, nullable=False),
    Column("encoding", String(16), nullable=False),
    Column("started_at", UTCDateTime, nullable=False),
)

updates = Table(
    "updates",
    metadata,
    Column("run", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("device", String(36), ForeignKey("devices.id"), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("blob", String(64), nullable=False),
    Column("sent_sha256", String(64), nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("accepted_at", UTCDateTime, nullable=False),
    Column("figures", JSON, nullable=True),  # wire.relays.Figures, if a relay keeps the update
)

secure_groups = Table(
    "secure_groups",
    metadata,
    Column("run", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column(
        "stage", Integer, nullable=False
    ),  # that takes messages now, as an index of wire.secure.STAGES; 5: over
    Column("opened_at", UTCDateTime, nullable=False),
    Column("ended", Text, nullable=True),  # why the group has no sum
)
secure_messages = Table(
    "secure_messages",
    metadata,
    Column("task", String(36), ForeignKey("tasks.id"), primary_key=True),
    Column(
        "kind", Integer, primary_key=True
    ),  # strategies.secagg.messages.Kind; -1: why the device was refused, as text
    Column("body", LargeBinary, nullable=False),
    Column("certificate", Text, nullable=True),  # whose key has signed the device's keys, PEM
)
evaluations = Table(
    "evaluations",
    metadata,
    Column("run", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("device", String(36), ForeignKey("devices.id"), primary_key=True),
    Column("result", JSON, nullable=False),  # wire.device.EvaluationResult
    Column("received_at", UTCDateTime, nullable=False),
)

statistics = Table(
    "statistics",
    metadata,
    Column("run", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("device", String(36), ForeignKey("devices.id"), primary_key=True),
    Column("result", JSON, nullable=False),  # wire.statistics.StatisticsResult
    Column("received_at", UTCDateTime, nullable=False),
)

privacy_ledgers = Table(
    "privacy_ledgers",
    metadata,
    Column("run", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("mechanism", JSON, nullable=False),  # privacy.mechanism.Mechanism, from which epsilon follows
    Column("rounds", Integer, nullable=False),  # charged
    Column("epsilon", Float, nullable=False),  # that they have spent
    Column("charged_at", UTCDateTime, nullable=True),
    Column("released", JSON(none_as_null=True), nullable=True),  # of the round that is not committed yet
)

privacy_spending = Table(
    "privacy_spending",
    metadata,
    Column("run", String(36), ForeignKey("runs.id"), primary_key=True),
    Column("device", String(36), ForeignKey("devices.id"), primary_key=True, index=True),
    Column("rounds", Integer, nullable=False),  # in which its update may be
    Column("first_round", Integer, nullable=False),
    Column("last_round", Integer, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", ROW_ID, primary_key=True, autoincrement=True),
    Column("time", UTCDateTime, nullable=False),
    Column("event", String(60), nullable=False),
    Column("run", String(36), nullable=True, index=True),
    Column("device", String(36), nullable=True, index=True),
    Column("values", JSON, nullable=False),
    project_column(nullable=True),  # null: of the whole coordinator
)


models = Table(
    "models",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("latest", Integer, nullable=False),  # number of the newest version; numbers are never reused
    Column("created_at", UTCDateTime, nullable=False),
    project_column(),
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


def columns_of(table: Table, kind: type) -> list[ColumnElement[Any]]:
    """The columns of a table that the fields of a dataclass are named after, in their order."""
    return [table.c[each.name] for each in fields(kind)]


def find_row(
    connection: Connection, kind: type[RowT], table: Table, *where: ColumnElement[bool]
) -> RowT | None:
    """The row of a table for which this holds, as a dataclass of its columns; None if there is none."""
    row = connection.execute(select(*columns_of(table, kind)).where(*where)).one_or_none()
    return None if row is None else kind(*row)


def count_by(
    connection: Connection, column: ColumnElement[str], where: ColumnElement[bool] | None = None
) -> dict[str, int]:
    """Number of rows, or of those `where` holds, by the value of a column."""
    query = select(column, func.count()).group_by(column)
    rows = connection.execute(query if where is None else query.where(where)).all()
    return {str(value): int(count) for value, count in rows}
