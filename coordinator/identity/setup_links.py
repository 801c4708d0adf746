"""The link that creates the first account: made when a coordinator without users starts, valid once and for a day.

`<home>/setup-link` holds it, readable by its owner only, until it is used; the database holds the hash of its secret. The
secret is the fragment of the URL: browsers send it to no server, so it is in no log.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import Connection, delete, insert, select

from coordinator.db.store import Database
from coordinator.errors import Refusal
from coordinator.identity.principals import Role
from coordinator.identity.sessions import hash_of
from coordinator.identity.tables import setup_links
from coordinator.identity.users import UserRow, add_user, count_users
from edge_client.files import write_durably

LINK_FILE = "setup-link"
FRAGMENT = "#setup="
LIFETIME = timedelta(days=1)
_ROLE: Role = "admin"


def renew_setup_link(connection: Connection, now: datetime) -> str | None:
    """The secret of a new link, which replaces earlier ones; None if there are users."""
    connection.execute(delete(setup_links))
    if count_users(connection):
        return None
    secret = secrets.token_urlsafe(32)
    connection.execute(
        insert(setup_links).values(secret_sha256=hash_of(secret), created_at=now, expires_at=now + LIFETIME)
    )
    return secret


def is_valid(connection: Connection, secret: str, now: datetime) -> bool:
    """Whether this is the secret of the link, and users may still be set up with it."""
    query = select(setup_links.c.secret_sha256).where(
        setup_links.c.secret_sha256 == hash_of(secret), setup_links.c.expires_at > now
    )
    return connection.execute(query).first() is not None and not count_users(connection)


def use_setup_link(
    connection: Connection, secret: str, name: str, password_hash: str, now: datetime
) -> UserRow:
    """Creates the first account, an admin, and ends the link.

    Raises:
        Refusal: 403 `setup_link_ended`: it was used, has expired or was replaced, or users exist.
    """
    used = connection.execute(
        delete(setup_links).where(
            setup_links.c.secret_sha256 == hash_of(secret), setup_links.c.expires_at > now
        )
    )
    if used.rowcount != 1 or count_users(connection):
        raise setup_link_ended()
    return add_user(connection, name, _ROLE, password_hash, now)


def setup_link_ended() -> Refusal:
    return Refusal(
        403,
        "setup_link_ended",
        "this link was used, has expired or was replaced; restart `fedloop serve` for a new one, or add a user with the "
        "admin token: fedloop user add",
    )


def offer_setup_link(home: Path, operator_url: str, database: Database, now: datetime) -> str | None:
    """Leaves a new link in the home and returns it; removes the file and returns None if there are users.

    Raises:
        OSError: the file cannot be written.
    """
    secret = database.write(lambda at: renew_setup_link(at, now)).result()
    link = None if secret is None else f"{operator_url}/{FRAGMENT}{secret}"
    write_link(home, link)
    return link


def write_link(home: Path, url: str | None) -> None:
    """Leaves the link in the home, or removes the file without one."""
    path = home / LINK_FILE
    if url is None:
        path.unlink(missing_ok=True)
    else:
        write_durably(path, url.encode() + b"\n", mode=0o600)
