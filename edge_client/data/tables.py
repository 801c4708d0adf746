"""The table behind a data set of any kind that has one, before its cells become examples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from edge_client.data.connector import DataConfig, DataProblem
from edge_client.data.csv_file import CsvOptions, open_table
from edge_client.data.options import TableOptions, read_options
from edge_client.data.parquet_file import read_parquet
from edge_client.data.sqlite_query import SqliteOptions, read_query
from edge_client.data.table import Table

T = TypeVar("T")


def read_table(config: DataConfig, use: Callable[[Table, TableOptions], T]) -> T:
    """What `use` returns for the data set's table and options.

    Raises:
        DataProblem: the data set cannot be read, or is no table.
    """
    if config.kind == "csv":
        options, path = read_options(CsvOptions, config)
        with open_table(path, options.delimiter, encoding=options.encoding, limit_bytes=sys.maxsize) as table:
            return use(table, options)
    if config.kind == "parquet":
        plain, path = read_options(TableOptions, config)
        return read_parquet(path, plain, use)
    if config.kind == "sqlite":
        query, path = read_options(SqliteOptions, config)
        return read_query(path, query, use)
    raise DataProblem(f"data of kind {config.kind!r} is no table; tables are: csv, parquet, sqlite")
