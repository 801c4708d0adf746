"""The services of a coordinator in a folder, without a process around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from coordinator.api.deps import ensure_admin_token
from coordinator.blobs import Blobs
from coordinator.db.migrations import migrate
from coordinator.db.store import Database
from coordinator.pki import Authority
from coordinator.services import Services, utc_now
from coordinator.settings import Settings
from coordinator.signals import Signals


@contextmanager
def services_in(home: Path, database_url: str | None = None, **settings: Any) -> Iterator[Services]:
    """Opened as `fedloop serve` does; opened again on the same home, it finds what was there. `settings`: more of them."""
    home.mkdir(exist_ok=True)
    ensure_admin_token(home)
    url = database_url or f"sqlite:///{home / 'fedloop.db'}"
    chosen = Settings(home, url, **settings)
    migrate(url)
    with closing(Database(url)) as database:
        signals = Signals()
        yield Services(chosen, database, Blobs(home / "blobs"), signals, Authority.open(chosen, utc_now))
        signals.close()
