"""Schema migrations with Alembic, applied when `fedloop serve` starts.

`versions/` holds one file per change, never edited once released. The tables in `coordinator/` are the schema that the
code expects; a test compares the two on both databases.
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
from coordinator.storage.errors import remedy

_LOCK = 0x6665646C6F6F70  # "fedloop": PostgreSQL's advisory lock during a migration


def migrate(database_url: str) -> None:
    """Upgrades the database to the current schema in one transaction; creates the tables of an empty one.

    Raises:
        UserError: it cannot be opened, or a newer version of Fedloop created it.
    """
    engine = open_engine(database_url)
    where = engine.url.render_as_string(hide_password=True)
    try:
        with engine.execution_options(writing=True).begin() as connection:
            _upgrade(connection, where)
    except OperationalError as error:
        raise UserError(f"cannot open the database {where}: {_first_line(error)}; {remedy(error)}") from None
    finally:
        engine.dispose()


def configuration(connection: Connection) -> Config:
    """Alembic's configuration for this connection; there is no configuration file."""
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
                "one created it; install that, or set another --home or FEDLOOP_DATABASE_URL"
            )
    command.upgrade(config, "head")


def _first_line(error: OperationalError) -> str:
    return str(error.orig).strip().partition("\n")[0]
