"""Entries of the audit log: their table, their hash chain, and how one is appended.

Entries are numbered from 1 without gaps. Each holds the hash of the one before, so that no entry can be altered, removed or
inserted without a change of every later hash:

    hash(n) = SHA-256 of the canonical JSON of all columns of entry n but `hash`, among them `previous` = hash(n - 1)

Canonical JSON has sorted keys, no spaces, and ASCII only (other characters as \\uXXXX). All columns are text or integers, so
that both databases return exactly what was hashed. The chain begins with `GENESIS`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import BigInteger, Column, Connection, Integer, Row, String, Table, Text, insert, select, text

from coordinator.db.tables import ROW_ID, metadata

Stage = Literal["begun", "ended", "done", "refused"]
"""`begun`: written before a change. `ended`: its outcome. `done`: both at once. `refused`: the caller may not do this."""

GENESIS = "0" * 64
"""`previous` of the first entry."""
TEXT_LIMIT = 200
"""Characters of a name, an action, or a value among resources and details."""

_LOCK = 0x6175646974  # "audit": PostgreSQL's advisory lock of those who append

audit = Table(
    "audit",
    metadata,
    Column("number", ROW_ID, primary_key=True, autoincrement=False),
    Column("time", String(32), nullable=False),  # ISO 8601 in UTC with microseconds
    Column("stage", String(8), nullable=False),
    Column("begun", BigInteger, nullable=True, index=True),  # of `ended`: number of the entry that it ends
    Column("principal_kind", String(16), nullable=False),
    Column("principal", String(200), nullable=False),
    Column("address", String(64), nullable=False),
    Column("action", String(200), nullable=False),  # `POST /runs/{run}/cancel`
    Column("resource", Text, nullable=False),  # path parameters, as a JSON object
    Column("status", Integer, nullable=True),  # of the HTTP answer; null: not known yet, or no request
    Column("details", Text, nullable=False),  # a JSON object
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)

COLUMNS = tuple(column.name for column in audit.columns)


@dataclass(frozen=True)
class Entry:
    """What an entry says. `resource` and `details` hold scalars, or lists of them; longer texts are cut."""

    stage: Stage
    principal_kind: str
    principal: str
    action: str
    address: str = ""
    resource: Mapping[str, Any] = field(default_factory=dict)
    status: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    begun: int | None = None


def append(connection: Connection, entry: Entry, now: datetime) -> int:
    """Adds an entry at the end of the chain, in the transaction of `connection`; its number."""
    if connection.dialect.name == "postgresql":
        # Two processes on one database must not both continue from the same entry.
        connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": _LOCK})
    number, previous = last(connection)
    row = {
        "number": number + 1,
        "time": timestamp(now),
        "stage": entry.stage,
        "begun": entry.begun,
        "principal_kind": entry.principal_kind,
        "principal": entry.principal[:TEXT_LIMIT],
        "address": entry.address[:64],
        "action": entry.action[:TEXT_LIMIT],
        "resource": canonical(_short(entry.resource)),
        "status": entry.status,
        "details": canonical(_short(entry.details)),
        "previous": previous,
    }
    connection.execute(insert(audit).values(**row, hash=hash_of(row)))
    return number + 1


def last(connection: Connection) -> tuple[int, str]:
    """Number and hash of the last entry; 0 and `GENESIS` of an empty log."""
    row = connection.execute(
        select(audit.c.number, audit.c.hash).order_by(audit.c.number.desc()).limit(1)
    ).one_or_none()
    return (0, GENESIS) if row is None else (row.number, row.hash)


def hash_at(connection: Connection, number: int) -> str | None:
    """The hash stored with an entry; None if there is no such entry."""
    if number == 0:
        return GENESIS
    stored: str | None = connection.execute(
        select(audit.c.hash).where(audit.c.number == number)
    ).scalar_one_or_none()
    return stored


def raw_entries(connection: Connection, after: int, limit: int) -> list[dict[str, Any]]:
    """Entries as stored, in order. What an intruder put in place of a text or a number is readable too."""
    rows = connection.execute(
        select(audit).where(audit.c.number > after).order_by(audit.c.number).limit(limit)
    ).all()
    return [_readable(row) for row in rows]


def hash_of(row: Mapping[str, Any]) -> str:
    """The hash that an entry must have. `row`: its columns; `hash` is ignored."""
    document = {name: row.get(name) for name in COLUMNS if name != "hash"}
    return hashlib.sha256(canonical(document).encode()).hexdigest()


def canonical(document: Mapping[str, Any]) -> str:
    """JSON with sorted keys, without spaces, in ASCII."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def timestamp(time: datetime) -> str:
    """A time as entries and heads hold it; texts are in the order of the times."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")


def _short(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value[:TEXT_LIMIT] if isinstance(value, str) else value for key, value in values.items()}


def _readable(row: Row[Any]) -> dict[str, Any]:
    return {
        key: value if value is None or isinstance(value, int | str) else repr(value)
        for key, value in row._mapping.items()
    }
