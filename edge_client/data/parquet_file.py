"""Parquet files, read a batch of rows at a time. A column may hold lists of numbers, such as an image's pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from edge_client.data.connector import Connector, DataConfig, DataProblem
from edge_client.data.options import TableOptions, read_only_problem, read_options
from edge_client.data.rows import files_connector
from edge_client.data.table import BLOCK_ROWS, Table
from edge_client.data.table_reader import read_rows

T = TypeVar("T")


def open_connector(config: DataConfig) -> Connector:
    """A Connector to a Parquet file.

    Raises:
        DataProblem: pyarrow is not installed here, or an option does not fit.
    """
    options, path = read_options(TableOptions, config)
    try:
        import pyarrow  # noqa: F401 - imported early, so that a preview reports it
    except ModuleNotFoundError:
        raise DataProblem("parquet data needs pyarrow on this device: pip install 'fedloop[data]'") from None

    return files_connector(options, path, lambda each: read_parquet(each, options, read_rows))


def read_parquet(path: Path, options: TableOptions, use: Callable[[Table, TableOptions], T]) -> T:
    """What `use` returns for the table of a file.

    Raises:
        DataProblem: it cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = _columns(options, tuple(schema.names))
            kinds = tuple(str(schema.field(name).type) for name in columns)
            return use(Table(str(path), columns, kinds, enumerate(_cells(file, columns), 1), "row"), options)
    except OSError as error:
        raise read_only_problem(path, error) from None
    except pyarrow.ArrowException as error:
        raise DataProblem(f"{path}: cannot be read as Parquet: {error}") from None


def _columns(options: TableOptions, names: tuple[str, ...]) -> tuple[str, ...]:
    """The columns to read; all of them where a name is unknown, so that `read_rows` reports it."""
    selected = {*options.features, options.label, options.split} - {None}
    if not options.features or options.closed or not selected <= set(names):
        return names
    return tuple(name for name in names if name in selected)


def _cells(file: Any, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    for batch in file.iter_batches(batch_size=BLOCK_ROWS, columns=list(columns), use_threads=False):
        yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
