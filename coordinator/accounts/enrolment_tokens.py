"""Enrolment tokens: create one, withdraw it, and use it to admit a device."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import Field
from sqlalchemy import Connection

from coordinator.accounts import relays
from coordinator.accounts.certificate_authority import Authority
from coordinator.db import tokens
from coordinator.db.devices import DeviceRow
from coordinator.db.events import record
from coordinator.db.project_filter import project_of
from coordinator.db.tokens import TokenRow
from coordinator.errors import Refusal
from coordinator.project_names import DEFAULT_PROJECT

TOKEN_PREFIX = "fl1"
MAX_USES = 1_000_000
TEXT_LIMIT = 200
"""Characters of a name, a group or a serial number."""

_TOKENS_KEPT = timedelta(days=90)
"""After their end, so that refusals can say why one no longer admits."""


@dataclass(frozen=True)
class TokenTerms:
    """What a new token admits, as an operator requests it."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - for requests to the API

    uses: Annotated[
        int | None, Field(ge=1, le=MAX_USES, description="Default: 1; for listed machines, any.")
    ] = None
    ttl_seconds: Annotated[float, Field(gt=0, le=366 * 86_400)] = 900.0
    group: Annotated[str, Field(min_length=1, max_length=TEXT_LIMIT)] = "default"
    needs_approval: Annotated[bool, Field(description="An operator must approve each device.")] = False
    listed_serials_only: Annotated[
        bool, Field(description="Only listed machines, once each, into the list's group.")
    ] = False
    relay: Annotated[
        str | None,
        Field(min_length=1, max_length=36, description="Id of the relay that the devices belong to."),
    ] = None
    relay_names: Annotated[
        list[str] | None,
        Field(
            min_length=1,
            max_length=16,
            description="Admit relays, which devices reach at these host names or addresses.",
        ),
    ] = None


def create_token(
    connection: Connection, authority: Authority, terms: TokenTerms, now: datetime
) -> tuple[TokenRow, str]:
    """Creates a token that lets devices enrol, and its text, which pins the CA that they trust. The text is not stored."""
    secret = secrets.token_urlsafe(32)
    project = project_of(connection) or DEFAULT_PROJECT
    relay, names = relays.check_terms(connection, authority, terms.relay, terms.relay_names, project)
    row = TokenRow(
        id=str(uuid.uuid4()),
        secret_sha256=_sha256(secret),
        device_group=plain_text(terms.group, "group"),
        uses_left=terms.uses or (MAX_USES if terms.listed_serials_only else 1),
        needs_approval=terms.needs_approval,
        listed_serials_only=terms.listed_serials_only,
        created_at=now,
        expires_at=now + timedelta(seconds=terms.ttl_seconds),
        project=project,
        relay=relay,
        relay_names=names,
    )
    tokens.drop(connection, now - _TOKENS_KEPT)
    tokens.add(connection, row)
    record(connection, now, "token_made", token=row.id, group=row.device_group, uses=row.uses_left)
    return row, f"{TOKEN_PREFIX}.{authority.ca_sha256}.{secret}"


def withdraw_token(connection: Connection, token: str, now: datetime) -> TokenRow:
    """Ends a token now; devices that enrolled with it stay.

    Raises:
        Refusal: 404 `not_found`.
    """
    row = tokens.by_id(connection, token) if token.isprintable() else None
    if row is None:
        raise Refusal(
            404, "not_found", f"there is no token {token[:40]!r}; list the tokens: fedloop device tokens"
        )
    if now < row.expires_at:
        tokens.end(connection, row.id, now)
        record(connection, now, "token_withdrawn", token=row.id, group=row.device_group)
    return replace(row, expires_at=min(row.expires_at, now))


def plain_text(text: str, what: str) -> str:
    """A name, a group or a serial number, stripped: printable, on one line, of limited length.

    Raises:
        Refusal: 422 `malformed`.
    """
    if not text.strip() or len(text) > TEXT_LIMIT or not text.isprintable():
        raise Refusal(
            422, "malformed", f"{what} is {text[:40]!r}, expected 1 to {TEXT_LIMIT} printable characters"
        )
    return text.strip()


def find_token(connection: Connection, authority: Authority, text: str) -> TokenRow:
    """The token with this text. Raises: Refusal: 403 `token_unknown`."""
    prefix, _, rest = text.partition(".")
    ca_sha256, _, secret = rest.partition(".")
    if prefix != TOKEN_PREFIX or not secret or not text.isascii():
        raise Refusal(403, "token_unknown", f"not an enrolment token; one begins with {TOKEN_PREFIX}.")
    if not hmac.compare_digest(ca_sha256, authority.ca_sha256):
        raise Refusal(403, "token_unknown", "this token is for another coordinator")
    token = tokens.find(connection, _sha256(secret))
    if token is None:
        raise Refusal(
            403, "token_unknown", "this token is not known here; create a new one: fedloop device token"
        )
    return token


def require_usable(token: TokenRow, now: datetime) -> None:
    """Requires that the token still admits a device. Raises: Refusal: 403 `token_used`, `token_expired`."""
    if token.uses_left < 1:
        raise _token_used()
    if now >= token.expires_at:
        raise Refusal(
            403,
            "token_expired",
            f"this token expired at {token.expires_at.astimezone(UTC):%Y-%m-%d %H:%M UTC}; create a new one: "
            "fedloop device token",
        )


def group_of(connection: Connection, token: TokenRow, serial: str | None) -> str:
    """The group of a device admitted by this token. Raises: Refusal: 403 `serial_unknown`."""
    if not token.listed_serials_only:
        return token.device_group
    group = None if serial is None else tokens.group_of_serial(connection, serial, token.project)
    if group is None:
        raise Refusal(
            403,
            "serial_unknown",
            f"this token is for listed machines, and {serial or 'a machine without a serial number'} is not listed: "
            "fedloop device import",
        )
    return group


def use_token(connection: Connection, token: TokenRow, device: DeviceRow) -> None:
    """Takes one use of the token for this device. Raises: Refusal: 403 `serial_used`, `token_used`."""
    if token.listed_serials_only:
        assert device.serial_number is not None  # looked up for the group
        if not tokens.use_serial(connection, device.serial_number, device.id, token.project):
            raise Refusal(
                403,
                "serial_used",
                f"a machine with the serial number {device.serial_number} enrolled before; use another token for this one: "
                "fedloop device token",
            )
    if not tokens.use(connection, token.id):
        raise _token_used()


def _token_used() -> Refusal:
    return Refusal(403, "token_used", "this token was used; create a new one: fedloop device token")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
