"""A check at start that the database is intact and belongs to this home.

Without it, a page that the disk has zeroed would show in the middle of a round, or never, and an emptied database would
get new tables and a fleet that it does not know.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from coordinator.db.store import open_engine
from coordinator.errors import UserError
from coordinator.storage.errors import is_damaged_database, is_temporary

_BESIDE = ("blobs", "runs")
"""Folders of the home whose contents a database refers to."""


def require_intact(database_url: str, home: Path) -> None:
    """Checks a SQLite database for damage (`PRAGMA quick_check`), and a database of either kind for lost tables.

    Raises:
        UserError: it is damaged, or has no tables although the home holds blobs or runs. Nothing was changed.
    """
    engine = open_engine(database_url)
    where = engine.url.render_as_string(hide_password=True)
    beside = _used_folder(home)
    try:
        if engine.dialect.name == "sqlite" and _is_empty(Path(str(make_url(database_url).database))):
            # Not opened: SQLite would remove the write-ahead log of an empty file.
            if beside:
                raise _emptied(where, beside)
            return
        with engine.connect() as connection:
            damage = _damage(connection)
            if damage is not None:
                raise _damaged(where, damage)
            if beside and not inspect(connection).get_table_names():
                raise _emptied(where, beside)
    except DBAPIError as error:
        if is_damaged_database(error):
            raise _damaged(where, str(error.orig)) from None
        if not is_temporary(error):
            raise
        # `migrate`, which opens the database too, reports it
    finally:
        engine.dispose()


def _damage(connection: Connection) -> str | None:
    """The damage that SQLite finds in its file; None if there is none. PostgreSQL checks its own files."""
    if connection.dialect.name != "sqlite":
        return None
    findings = connection.execute(text("PRAGMA quick_check(3)")).scalars().all()
    return None if findings == ["ok"] else " ".join("; ".join(findings).split())[:300]


def _is_empty(file: Path) -> bool:
    return not file.exists() or file.stat().st_size == 0


def _used_folder(home: Path) -> Path | None:
    """A folder of the home whose contents a database refers to; None if all are empty."""
    for name in _BESIDE:
        folder = home / name
        if folder.is_dir() and any(not each.name.startswith(".") for each in folder.iterdir()):
            return folder
    return None


def _damaged(where: str, damage: str) -> UserError:
    return UserError(
        f"the database {where} is damaged: {damage}; nothing was changed. Check the disk, then restore the database and its "
        "-wal file from the last backup of the home; without one, `sqlite3 OLD .recover | sqlite3 NEW` saves what can be read"
    )


def _emptied(where: str, beside: Path) -> UserError:
    return UserError(
        f"the database {where} has no tables, but {beside} holds files that belong to a database: it was emptied or lost, or "
        "is another one. Nothing was changed. Restore it from the last backup, or set FEDLOOP_DATABASE_URL to the right one; "
        f"to start afresh instead, move {' and '.join(_BESIDE)} out of {beside.parent}"
    )
