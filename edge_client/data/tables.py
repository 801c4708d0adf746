"""The table behind a data set of any kind that has one, before its cells become examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from edge_client.data.connector import DataConfig, DataProblem
from edge_client.data.contract import TABLE_KINDS
from edge_client.data.csv_file import CsvOptions, open_as
from edge_client.data.options import HELD_OUT, TableOptions, read_options
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
        with open_as(options, path) as table:
            return use(table, options)
    if config.kind == "parquet":
        plain, path = read_options(TableOptions, config)
        return read_parquet(path, plain, use)
    if config.kind == "sqlite":
        query, path = read_options(SqliteOptions, config)
        return read_query(path, query, use)
    raise DataProblem(f"data of kind {config.kind!r} is no table; tables are: {', '.join(TABLE_KINDS)}")


def awaits_schema(config: DataConfig) -> bool:
    """Whether the configuration of a table says only where its rows are, so that a model's schema has to describe the columns.

    One that names the label may describe a table of numbers completely.
    """
    return config.kind in TABLE_KINDS and not config.options.keys() - _PLACE


_PLACE = {"label", "encoding", "delimiter", "query", "exclude", "split", "held_out", "test_path"}


def count_rows(config: DataConfig) -> int:
    """The training rows of a table whose columns are not described yet; without a column `split` about as many.

    Raises:
        DataProblem: it cannot be read.
    """

    def count(table: Table, options: TableOptions) -> int:
        if options.split is None:
            share = HELD_OUT if options.held_out is None else options.held_out
            total = sum(1 for _ in table.records)
            return total if options.test_path else total - int(total * share)
        place = table.index(options.split, "the split")
        return sum(str(cells[place]).strip().casefold() != "test" for _, cells in table.records)

    return read_table(config, count)
