"""Operator API: enrolment tokens and lists of serial numbers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from coordinator.accounts import enrolment_tokens
from coordinator.accounts.enrolment_tokens import TokenTerms, plain_text
from coordinator.api.deps import RequestBody, ServicesDep
from coordinator.db import tokens
from coordinator.db.project_filter import NOBODY
from coordinator.db.tokens import TokenRow

router = APIRouter(tags=["enrolment"])


class MadeToken(BaseModel):
    """A new token. Its text is shown only here."""

    id: str
    token: str
    url: str = Field(description="What devices connect to.")
    group: str
    uses: int
    expires_at: datetime


class Token(BaseModel):
    """An existing token. Its text is not stored."""

    id: str
    group: str
    uses_left: int
    needs_approval: bool
    listed_serials_only: bool
    created_at: datetime
    expires_at: datetime
    relay: str | None = Field(None, description="Id of the relay that its devices belong to.")
    relay_names: list[str] | None = Field(
        None, description="Of a token for relays: host names and addresses that devices reach them at."
    )


class SerialsRequest(RequestBody):
    """Machines that may enrol with a token for listed machines."""

    serial_numbers: list[str] = Field(min_length=1, max_length=100_000)
    group: str = Field("default", min_length=1, max_length=enrolment_tokens.TEXT_LIMIT)


class SerialsAdded(BaseModel):
    added: int
    already_listed: int


@router.post("/tokens", status_code=201)
def make_token(terms: TokenTerms, services: ServicesDep) -> MadeToken:
    """Creates an enrolment token."""
    row, text = services.commit(
        lambda at: enrolment_tokens.create_token(at, services.authority, terms, services.clock())
    )
    return MadeToken(
        id=row.id,
        token=text,
        url=services.settings.device_url,
        group=row.device_group,
        uses=row.uses_left,
        expires_at=row.expires_at,
    )


@router.get("/tokens")
def list_tokens(services: ServicesDep, limit: Annotated[int, Query(ge=1, le=1000)] = 1000) -> list[Token]:
    """Tokens that still admit devices, in order of expiry."""
    rows = services.database.read(lambda at: tokens.usable(at, services.clock(), limit))
    return [_render(row) for row in rows]


@router.post("/tokens/{token}/withdraw")
def withdraw_token(token: str, services: ServicesDep) -> Token:
    """Ends a token now. Devices that enrolled with it stay."""
    return _render(services.commit(lambda at: enrolment_tokens.withdraw_token(at, token, services.clock())))


def _render(row: TokenRow) -> Token:
    return Token(group=row.device_group, **vars(row))


@router.post("/serials")
def list_serials(request: SerialsRequest, services: ServicesDep) -> SerialsAdded:
    """Lists machines by serial number. Those listed already stay unchanged."""
    numbers = dict.fromkeys(plain_text(each, "a serial number") for each in request.serial_numbers)
    group, project = plain_text(request.group, "group"), services.project or NOBODY
    added = services.commit(
        lambda at: tokens.add_serials(at, list(numbers), group, services.clock(), project)
    )
    return SerialsAdded(added=added, already_listed=len(numbers) - added)
