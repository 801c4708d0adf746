"""A query on an SQLite file. The file is opened read-only, by URI and by pragma, and the query may only select."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from edge_client.data.connector import Connector, DataConfig, DataProblem
from edge_client.data.options import TableOptions, read_options
from edge_client.data.rows import RowsConnector
from edge_client.data.table import Table
from edge_client.data.table_reader import read_rows

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_BUSY_SECONDS = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class SqliteOptions(TableOptions):
    """Options of SQLite files.

    Attributes:
        query: a SELECT whose columns are features, label and, where there is one, the split.
    """

    query: str = ""


def open_connector(config: DataConfig) -> Connector:
    """A Connector to the result of a query.

    Raises:
        DataProblem: the query is missing, or an option does not fit.
    """
    options, path = read_options(SqliteOptions, config)
    if not options.query.strip():
        raise DataProblem('sqlite data needs the option query, such as "SELECT a, b, label FROM readings"')
    if options.test_path is not None:
        raise DataProblem(
            "sqlite data has no option test_path; name a column of the query by the option split"
        )
    return RowsConnector(options, lambda: read_query(path, options, read_rows))


def read_query(path: Path, options: SqliteOptions, use: Callable[[Table, TableOptions], T]) -> T:
    """What `use` returns for the table that the query selects.

    Raises:
        DataProblem: there is no file, or the query cannot be answered.
    """
    if not path.is_file():
        raise DataProblem(f"{path}: no such file; `path` of the data set names it")
    try:
        with closing(_connect(path)) as connection:
            cursor = connection.execute(options.query)
            columns = tuple(entry[0] for entry in cursor.description or ())
            if len(set(columns)) < len(columns):
                raise DataProblem(f"{path}: the query has two columns of one name; name them apart with AS")
            table = Table(str(path), columns, (), enumerate(cursor, 1), "row")
            return use(table, options)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise DataProblem(f"{path}: the query cannot be answered: {error}") from None


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)
    connection.execute("PRAGMA query_only = 1")
    # No ATTACH and no further PRAGMA: any query reads this one file only.
    connection.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY
    )
    return connection
