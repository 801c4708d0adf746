"""Operator API: who may enrol. Tokens, and lists of serial numbers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from coordinator import enrolment
from coordinator.api.deps import Serving
from coordinator.db import tokens
from coordinator.db.tokens import TokenRow
from coordinator.enrolment import NewToken, TokenTerms, plain_text

MANY = 1_000_000
_YEAR_SECONDS = 366 * 86400

router = APIRouter(tags=["enrolment"])


class TokenRequest(BaseModel):
    """What a token is to admit."""

    model_config = {"extra": "forbid"}

    uses: int | None = Field(
        None, ge=1, le=MANY, description="Devices it admits: 1, or for listed machines all of them."
    )
    ttl_seconds: float = Field(900, gt=0, le=_YEAR_SECONDS)
    group: str = Field("default", min_length=1, max_length=enrolment.TEXT_LIMIT)
    needs_approval: bool = Field(False, description="A person approves each device.")
    listed_serials_only: bool = Field(
        False, description="Only machines whose serial number is listed, once each, into the list's group."
    )


class MadeToken(BaseModel):
    """A token. Its text is told here and never again."""

    id: str
    token: str
    url: str = Field(description="What devices connect to.")
    group: str
    uses: int
    expires_at: datetime


class Token(BaseModel):
    """A token that was made before. Its text is not kept."""

    id: str
    group: str
    uses_left: int
    needs_approval: bool
    listed_serials_only: bool
    created_at: datetime
    expires_at: datetime


class SerialsRequest(BaseModel):
    """Machines that may enrol with a token for listed machines."""

    model_config = {"extra": "forbid"}

    serial_numbers: list[str] = Field(min_length=1, max_length=100_000)
    group: str = Field("default", min_length=1, max_length=enrolment.TEXT_LIMIT)


class SerialsAdded(BaseModel):
    added: int
    already_listed: int


@router.post("/tokens", status_code=201)
def make_token(request: TokenRequest, services: Serving) -> MadeToken:
    """Makes an enrolment token."""
    terms = TokenTerms(
        request.uses or (MANY if request.listed_serials_only else 1),
        timedelta(seconds=request.ttl_seconds),
        request.group,
        request.needs_approval,
        request.listed_serials_only,
    )

    def work(connection: Connection) -> NewToken:
        return enrolment.make_token(connection, services.authority, terms, services.clock())

    made = services.database.write(work).result()
    services.signals.notify("events")
    return MadeToken(
        id=made.row.id,
        token=made.text,
        url=services.settings.device_url,
        group=made.row.device_group,
        uses=made.row.uses_left,
        expires_at=made.row.expires_at,
    )


@router.get("/tokens")
def list_tokens(services: Serving, limit: Annotated[int, Query(ge=1, le=1000)] = 1000) -> list[Token]:
    """Tokens that still admit devices, those that end first before the others."""
    found = services.database.read(lambda at: tokens.usable(at, services.clock(), limit))
    return [_told(row) for row in found]


@router.post("/tokens/{token}/withdraw")
def withdraw_token(token: str, services: Serving) -> Token:
    """Ends a token now. Devices that enrolled with it stay."""
    row = services.database.write(lambda at: enrolment.withdraw_token(at, token, services.clock())).result()
    services.signals.notify("events")
    return _told(row)


def _told(row: TokenRow) -> Token:
    return Token(
        id=row.id,
        group=row.device_group,
        uses_left=row.uses_left,
        needs_approval=row.needs_approval,
        listed_serials_only=row.listed_serials_only,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


@router.post("/serials")
def list_serials(request: SerialsRequest, services: Serving) -> SerialsAdded:
    """Lists machines by serial number. Those that are listed already stay as they are."""
    numbers = dict.fromkeys(plain_text(each, "a serial number") for each in request.serial_numbers)
    group = plain_text(request.group, "group")

    def work(connection: Connection) -> int:
        return tokens.add_serials(connection, list(numbers), group, services.clock())

    added = services.database.write(work).result()
    return SerialsAdded(added=added, already_listed=len(numbers) - added)
