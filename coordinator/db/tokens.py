"""Queries of enrolment tokens and of listed serial numbers. Only the hash of a token's secret is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from coordinator.db.tables import columns_of, find_row, serials, tokens
from coordinator.project_names import DEFAULT_PROJECT


@dataclass(frozen=True)
class TokenRow:
    """A row of `tokens`: what the token admits, how many more devices, and until when. `relay`, `relay_names`: as of the devices."""

    id: str
    secret_sha256: str
    device_group: str
    uses_left: int
    needs_approval: bool
    listed_serials_only: bool
    created_at: datetime
    expires_at: datetime
    project: str = DEFAULT_PROJECT
    relay: str | None = None
    relay_names: Sequence[str] | None = None


def add(connection: Connection, token: TokenRow) -> None:
    connection.execute(insert(tokens).values(asdict(token)))


def find(connection: Connection, secret_sha256: str) -> TokenRow | None:
    return find_row(connection, TokenRow, tokens, tokens.c.secret_sha256 == secret_sha256)


def by_id(connection: Connection, token: str) -> TokenRow | None:
    return find_row(connection, TokenRow, tokens, tokens.c.id == token)


def usable(connection: Connection, now: datetime, limit: int) -> list[TokenRow]:
    """Tokens that still admit devices, in order of expiry."""
    query = select(*columns_of(tokens, TokenRow)).where(tokens.c.expires_at > now, tokens.c.uses_left > 0)
    rows = connection.execute(query.order_by(tokens.c.expires_at, tokens.c.id).limit(limit))
    return [TokenRow(*row) for row in rows]


def end(connection: Connection, token: str, now: datetime) -> None:
    """Ends a token now."""
    connection.execute(update(tokens).where(tokens.c.id == token).values(expires_at=now))


def use(connection: Connection, token: str) -> bool:
    """Takes one use of a token; False if none is left."""
    taken = connection.execute(
        update(tokens)
        .where(tokens.c.id == token, tokens.c.uses_left > 0)
        .values(uses_left=tokens.c.uses_left - 1)
    )
    return taken.rowcount == 1


def drop(connection: Connection, ended_before: datetime) -> None:
    """Deletes tokens that expired before this."""
    connection.execute(delete(tokens).where(tokens.c.expires_at < ended_before))


def add_serials(
    connection: Connection, numbers: Sequence[str], group: str, now: datetime, project: str
) -> int:
    """Lists machines for a project and returns the number of new ones; those listed already stay unchanged."""
    added = 0
    for number in dict.fromkeys(numbers):
        if group_of_serial(connection, number, project) is None:
            row = {"serial_number": number, "device_group": group, "added_at": now, "project": project}
            connection.execute(insert(serials).values(row))
            added += 1
    return added


def group_of_serial(connection: Connection, number: str, project: str) -> str | None:
    """The group that a machine is listed in by a project; None if it is not."""
    query = select(serials.c.device_group).where(*_listing(number, project))
    return connection.execute(query).scalar_one_or_none()


def use_serial(connection: Connection, number: str, device: str, project: str) -> bool:
    """Assigns a machine that a project listed its device; False if it has one."""
    taken = connection.execute(
        update(serials).where(*_listing(number, project), serials.c.device.is_(None)).values(device=device)
    )
    return taken.rowcount == 1


def _listing(number: str, project: str) -> tuple[ColumnElement[bool], ...]:
    return serials.c.serial_number == number, serials.c.project == project
