"""The table of jobs, and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import JSON, Column, Integer, String, Table, Text

from coordinator.db.project_filter import project_column
from coordinator.db.tables import UTCDateTime, metadata
from coordinator.project_names import DEFAULT_PROJECT

Kind = Literal["simulation", "pretraining", "plan", "compression", "export"]
State = Literal["queued", "running", "finished", "failed", "cancelled", "interrupted"]

LIVE: tuple[State, ...] = ("queued", "running")
STOPPED: tuple[State, ...] = ("failed", "cancelled", "interrupted")
"""States from which a job can be resumed."""

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("number", Integer, nullable=False, unique=True),  # in order of creation, whatever the clock
    Column("kind", String(16), nullable=False),
    Column("name", String(200), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("document", JSON, nullable=False),  # resolved
    Column("source", String(36), nullable=True),  # job whose model it starts from
    Column("processes", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("created_at", UTCDateTime, nullable=False),
    Column("started_at", UTCDateTime, nullable=True),  # of the last attempt
    Column("finished_at", UTCDateTime, nullable=True),
    Column("error", Text, nullable=True),
    project_column(),
)


@dataclass(frozen=True)
class JobRow:
    """A job. `processes`: that it needs at the same time; `attempts`: how often it was started."""

    id: str
    number: int
    kind: Kind
    name: str
    state: State
    document: Mapping[str, Any]
    source: str | None
    processes: int
    priority: int
    attempts: int
    created_by: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: str | None
    project: str = DEFAULT_PROJECT
