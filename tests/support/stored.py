"""The rows of a coordinator that runs in another process: to read them, and to change them where a test injects time."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Executable, Select

from coordinator.db.store import Database
from coordinator.demos.local_fleet import LocalFleet


def url_of(fleet: LocalFleet) -> str:
    """Of the coordinator's database: in its home, unless its environment names another one."""
    return fleet.environment.get("FEDLOOP_DATABASE_URL", f"sqlite:///{fleet.home / 'fedloop.db'}")


def rows(url: str, query: Select[Any]) -> list[Any]:
    database = Database(url)
    try:
        return database.read(lambda connection: list(connection.execute(query)))
    finally:
        database.close()


def change(url: str, statement: Executable) -> None:
    """Commits one statement; the coordinator finds it the next time it looks."""
    database = Database(url)
    try:
        database.write(lambda connection: connection.execute(statement).close()).result()
    finally:
        database.close()
