"""The services of a coordinator in a folder, without a process around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from coordinator.accounts.admin_token import ensure_admin_token
from coordinator.accounts.certificate_authority import Authority
from coordinator.context.services import Services, utc_now
from coordinator.context.signals import Signals
from coordinator.db.store import PATIENCE_SECONDS, Database
from coordinator.settings import Settings
from coordinator.storage.blobs import Blobs
from tests.support.databases import with_tables


@contextmanager
def services_in(
    home: Path,
    database_url: str | None = None,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    **settings: Any,
) -> Iterator[Services]:
    """Opened as `fedloop serve` does; opened again on the same home, it finds what was there.

    `patience_seconds`: how long writes wait for the database; `settings`: more of them.
    """
    home.mkdir(exist_ok=True)
    ensure_admin_token(home)
    url = database_url or f"sqlite:///{home / 'fedloop.db'}"
    chosen = Settings(home, url, **settings)
    with_tables(url)
    with closing(Database(url, patience_seconds=patience_seconds)) as database:
        signals = Signals()
        yield Services(chosen, database, Blobs(home / "blobs"), signals, Authority.open(chosen, utc_now))
        signals.close()
