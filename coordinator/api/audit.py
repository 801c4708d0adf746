"""Operator API: the audit log, as records for people and as entries for verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import AwareDatetime, BaseModel, Field

from coordinator.audit import entries, queries
from coordinator.audit.queries import Filters
from coordinator.audit.verification import Altered, verify_chain
from coordinator.context.services import ServicesDep
from coordinator.db.store import Database

router = APIRouter(prefix="/audit", tags=["audit"])

_PAGE = 1000
_Text = Annotated[str | None, Query(max_length=200, pattern="^[^\\x00]*$")]


class AuditRecord(BaseModel):
    """A change or a refused attempt. `outcome`: `unfinished` if the coordinator stopped before the end, or works on it."""

    number: int
    time: str
    kind: str = Field(description="admin_token | session | access_token | anonymous | process")
    name: str
    address: str
    action: str = Field(description="Method and path template.")
    resource: dict[str, Any] = Field(description="Path parameters.")
    details: dict[str, Any]
    outcome: Literal["done", "failed", "refused", "unfinished"]
    status: int | None
    ended_at: str | None
    hash: str


class AuditRecords(BaseModel):
    """A page of records, newest first."""

    records: list[AuditRecord]
    next: int | None = Field(description="`before` for the next page; null on the last one.")


class AuditEntries(BaseModel):
    """A page of entries as stored, oldest first; docs/audit.md says how they are hashed."""

    entries: list[dict[str, Any]]
    next: int | None = Field(description="`after` for the next page; null on the last one.")


class AuditHead(BaseModel):
    """The last entry, signed."""

    number: int
    hash: str
    time: str
    key: str = Field(description="Ed25519 public key in hex.")
    signature: str


class AuditVerification(BaseModel):
    """What a verification found. `entry` and `reason`: of the first entry that was altered, deleted, inserted or moved."""

    intact: bool
    entries: int | None = Field(description="Their number, if all are intact.")
    entry: int | None
    reason: str | None
    signed_at: str | None = Field(
        description="When the head was signed that the log was compared with; null: never."
    )


@router.get("")
def list_audit_records(
    services: ServicesDep,
    by: _Text = None,
    action: _Text = None,
    resource: _Text = None,
    since: AwareDatetime | None = None,
    refused: bool | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, lt=2**63, description="Only smaller numbers.")] = None,
) -> AuditRecords:
    """Changes and refused attempts, newest first. `action` and `resource` match a part of the text, `by` a name."""
    filters = Filters(by, action, resource, since, refused)
    rows = services.database.read(partial(queries.records, filters=filters, limit=limit + 1, before=before))
    page = rows[:limit]
    return AuditRecords(
        records=[AuditRecord(**row) for row in page], next=page[-1]["number"] if len(rows) > limit else None
    )


@router.get("/entries")
def list_audit_entries(
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after: Annotated[int | None, Query(ge=0, lt=2**63, description="Only larger numbers.")] = None,
) -> AuditEntries:
    """The entries of the chain, a page at a time."""
    rows = services.database.read(partial(entries.raw_entries, after=after or 0, limit=limit + 1))
    page = rows[:limit]
    return AuditEntries(entries=page, next=page[-1]["number"] if len(rows) > limit else None)


@router.get("/verify")
def verify_audit(services: ServicesDep) -> AuditVerification:
    """Whether the whole chain is as it was written, and still contains the head that was signed last.

    For a log that somebody with access to the coordinator's home may have rewritten, keep heads elsewhere and verify against
    those: `fedloop audit verify --head FILE`.
    """
    head = services.audit_heads.newest()
    known = {} if head is None or not head.number else {head.number: head.hash}
    signed_at = None if head is None else head.time
    try:
        count = verify_chain(_chain(services.database), known)
    except Altered as altered:
        return AuditVerification(
            intact=False, entries=None, entry=altered.number, reason=str(altered), signed_at=signed_at
        )
    return AuditVerification(intact=True, entries=count, entry=None, reason=None, signed_at=signed_at)


def _chain(database: Database) -> Iterator[dict[str, Any]]:
    """All entries in order, read a page at a time: a long log must not keep one transaction open."""
    after = 0
    while page := database.read(partial(entries.raw_entries, after=after, limit=_PAGE)):
        yield from page
        if not isinstance(page[-1]["number"], int):
            return
        after = page[-1]["number"]


@router.get("/head")
def sign_audit_head(services: ServicesDep) -> AuditHead:
    """The head of the log, signed now.

    409 `audit_altered`: the log does not contain the head that was signed before, which `head` holds.
    """
    return AuditHead(**asdict(services.audit_heads.sign(services.database, services.clock())))
