"""The database's shape over time: Alembic revisions, run by `fedloop serve` at its start.

`versions/` holds one file a change, never edited once released. `coordinator/db/tables.py` is the shape that the
code expects; a test holds the two against each other, on both databases.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from coordinator.db.store import open_engine
from coordinator.errors import UserError

_LOCK = 0x6665646C6F6F70  # "fedloop": PostgreSQL's advisory lock of whoever migrates


def migrate(database_url: str) -> None:
    """Brings the database to the shape that this code expects, in one transaction; an empty one gets its tables.

    Raises:
        UserError: it cannot be opened, or a newer version of Fedloop made it.
    """
    engine = open_engine(database_url)
    where = engine.url.render_as_string(hide_password=True)
    try:
        with engine.execution_options(writing=True).begin() as connection:
            _upgrade(connection, where)
    except OperationalError as error:
        raise UserError(f"cannot open the database {where}: {_first_line(error)}") from None
    finally:
        engine.dispose()


def configuration(connection: Connection) -> Config:
    """Alembic's configuration for this connection; there is no file of it."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection, where: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": _LOCK})
    config = configuration(connection)
    known = {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}
    for current in MigrationContext.configure(connection).get_current_heads():
        if current not in known:
            raise UserError(
                f"the database {where} is of revision {current!r}, which this version of Fedloop does not know: a newer "
                "one made it; install that, or give another --home or FEDLOOP_DATABASE_URL"
            )
    command.upgrade(config, "head")


def _first_line(error: OperationalError) -> str:
    return str(error.orig).strip().partition("\n")[0]
