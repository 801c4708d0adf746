"""CSV files: UTF-8, a line of column names, values between commas, semicolons or tabs."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from edge_client.connectors.connector import Connector, DataConfig, DataProblem
from edge_client.connectors.options import (
    TableOptions,
    read_only_problem,
    read_options,
    require_path,
)
from edge_client.connectors.rows import Rows, RowsConnector, all_rows
from edge_client.connectors.table import Record, Table, read_rows

_DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True)
class CsvOptions(TableOptions):
    """`delimiter`: found in the first line unless said."""

    delimiter: str | None = None


def open_connector(config: DataConfig) -> Connector:
    """A Connector to a CSV file."""
    options, path = read_options(CsvOptions, config), require_path(config)
    if options.delimiter is not None and len(options.delimiter) != 1:
        raise DataProblem(f"csv data: option delimiter is {options.delimiter!r}, expected one character")

    return RowsConnector(
        options, lambda: all_rows(path, options.test_path, lambda each: _rows(each, options))
    )


def _rows(path: Path, options: CsvOptions) -> Rows:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return read_rows(_table(path, file, options), options)
    except OSError as error:
        raise read_only_problem(path, error) from None
    except UnicodeDecodeError as error:
        raise DataProblem(
            f"{path}: byte 0x{error.object[error.start]:02x} is not UTF-8; save the table as UTF-8 (spreadsheets call it "
            "'CSV UTF-8')"
        ) from None


def _table(path: Path, file: TextIO, options: CsvOptions) -> Table:
    first = file.readline()
    file.seek(0)
    delimiter = options.delimiter or max(_DELIMITERS, key=first.count)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        columns = tuple(name.strip() for name in next(reader, ()))
    except csv.Error as error:
        raise DataProblem(f"{path}, line 1: {error}") from None
    if not any(columns):
        raise DataProblem(f"{path}: is empty, expected a line of column names and rows below it")
    repeated = [name for place, name in enumerate(columns) if name in columns[:place]]
    if repeated:
        raise DataProblem(f"{path}, line 1: column name {repeated[0]!r} stands twice; rename one")
    kinds = ("text",) * len(columns)
    return Table(str(path), columns, kinds, _records(path, reader, columns), "line")


def _records(path: Path, reader: Any, columns: tuple[str, ...]) -> Iterator[Record]:
    """Every row that is not blank, with the line on which it ends."""
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataProblem(
                f"{path}, line {reader.line_num}: {error}; a quote that is opened must be closed"
            ) from None
        if cells is None:
            return
        if len(cells) < 2 and not "".join(cells).strip():
            continue
        if len(cells) != len(columns):
            raise DataProblem(
                f"{path}, line {reader.line_num}: the row has {len(cells)} values for {len(columns)} columns; a value "
                "with the delimiter in it needs quotes"
            )
        yield reader.line_num, cells
