"""A CSV or Parquet file in memory, read as a device reads it, and what its columns hold: which are texts, and the order of their
categories and classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import date_number, folded, is_missing, number, numbers
from edge_client.data.csv_file import open_table
from edge_client.data.labels import NO_LABEL, class_name
from edge_client.data.labels import quantities as quantities_of
from edge_client.data.options import TableOptions
from edge_client.data.quoting import quoted
from edge_client.data.table import Record, Table
from edge_client.wire.schema import ColumnSchema
from models.datasets.dataset import DataError

CATEGORIES = 100
"""Most different texts of a column, unless a number is given."""


@dataclass(frozen=True)
class TextRules:
    """What texts of a column become values of their own.

    Attributes:
        max: most of them, the most frequent ones; None: all, and more than `CATEGORIES` are refused.
        minimum_count: training rows that have each; a model names no rarer one.
        fold: whether case and blanks make no difference.
    """

    max: int | None = None
    minimum_count: int = 1
    fold: bool = False


Sites = npt.NDArray[np.int32]
"""The site [N] of each row."""

MISTYPED = 0.05
"""Share of cells that may fail to be numbers in a column that is plainly one of numbers; they are mistakes."""


@dataclass(frozen=True)
class TextTable(Table):
    """A table whose records are all there: the line on which each begins, and its cells without surrounding blanks."""

    records: list[Record]

    def __len__(self) -> int:
        return len(self.records)

    def cells(self, column: str, purpose: str) -> list[str]:
        """One column from top to bottom.

        Raises:
            DataError: no column has that name; `purpose` says what it was wanted for.
        """
        place = self.index(column, purpose)
        return [cells[place] for _, cells in self.records]

    def at(self, row: int, column: str) -> str:
        """The place of a cell, to begin an error message with."""
        return self.place(self.records[row][0], column)


def read(path: Path, encoding: str | None = None) -> TextTable:
    """The table in `path`, a CSV or Parquet file. `encoding`: of a CSV file's text, where no mark at its start tells.

    Raises:
        DataError: naming the file, the line or row, and the column.
    """
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path, encoding)
    with open_table(path, encoding=encoding) as table:
        records = list(table.records)
    if not records:
        raise DataError(f"{path}: has column names but no rows")
    return TextTable(table.name, table.columns, table.kinds, records, table.counted, table.delimiter)


def _read_parquet(path: Path, encoding: str | None) -> TextTable:
    from edge_client.data.parquet_file import read_parquet

    if encoding is not None:
        raise DataError(f"{path}: data.encoding is that of a text file, and this is Parquet; leave it out")

    def as_text(table: Table, options: TableOptions) -> TextTable:
        records: list[Record] = [
            (
                row,
                [
                    _text(cell, partial(table.place, row, name))
                    for name, cell in zip(table.columns, cells, strict=True)
                ],
            )
            for row, cells in table.records
        ]
        return TextTable(table.name, table.columns, (), records, table.counted)

    try:
        table = read_parquet(path, TableOptions(), as_text)
    except ModuleNotFoundError:
        raise DataError(f"{path}: Parquet needs pyarrow: pip install 'fedloop[data]'") from None
    if not table.records:
        raise DataError(f"{path}: has column names but no rows")
    return table


def _text(cell: Any, place: Callable[[], str]) -> str:
    """A cell as a device reads it from the same file, where it is no number: as text without surrounding blanks."""
    if cell is None or cell != cell:
        return ""
    if isinstance(cell, list | dict | bytes):
        raise DataError(f"{place()}: holds a {type(cell).__name__}, expected a number, a text or a date")
    return str(cell).strip()


def column_schema(
    table: TextTable, name: str, rules: TextRules, training: npt.NDArray[np.bool_]
) -> ColumnSchema:
    """What a column holds: numbers, dates, or categories, with the texts that are named. `training`: [N].

    Raises:
        DataError: a stray text among numbers.
    """
    cells = table.cells(name, "a feature")
    gaps = np.isnan(numbers(cells, table.decimal_comma))
    stray = [row for row in np.flatnonzero(gaps).tolist() if not is_missing(cells[row])]
    if not stray:
        return ColumnSchema(name)
    count = len(cells) - int(gaps.sum())
    # One odd cell is a mistake in a table of any size, as long as numbers are what is usual.
    if count > len(stray) and len(stray) <= max(1, MISTYPED * (count + len(stray))):
        raise DataError(
            f"{table.at(stray[0], name)}: {quoted(cells[stray[0]])} is not a number, as {count:,} of the column's "
            f"{count + len(stray):,} values are; correct the cell, or empty it to have it filled"
        )
    if not count and all(date_number(cells[row]) is not None for row in stray):
        return ColumnSchema(name, "date")
    spelled = folded if rules.fold else str
    counted = training | (rules.minimum_count <= 1)
    counts = Counter(spelled(cell) for cell, counts in zip(cells, counted, strict=True) if cell and counts)
    if rules.max is None and len(counts) > CATEGORIES:
        raise DataError(
            f"{table.at(stray[0], name)}: {quoted(cells[stray[0]])} is not a number, and {len(counts):,} different values "
            f"are too many for categories (at most {CATEGORIES}); leave the column out, or set data.categories.max"
        )
    frequent = [text for text, rows in sorted(counts.items(), key=_by_rows) if rows >= rules.minimum_count]
    kept = in_order(set(frequent[: rules.max]))
    other = len(kept) < len({spelled(cell) for cell in cells if cell})
    return ColumnSchema(name, "category", categories=tuple(kept), other=other, fold=rules.fold)


def _by_rows(counted: tuple[str, int]) -> tuple[int, str]:
    text, rows = counted
    return -rows, text


def classes(table: TextTable, column: str) -> tuple[str, ...]:
    """The names of the classes in order: by value where all are numbers, else by text.

    Raises:
        DataError: a label is empty, all are equal, or nearly every row has its own.
    """
    cells = table.cells(column, "the label")
    for row, cell in enumerate(cells):
        if cell.casefold() in NO_LABEL:
            raise DataError(f"{table.at(row, column)}: the label is empty; fill it in or remove the row")
    values = [number(cell, table.decimal_comma) for cell in cells]
    by_value = [class_name(value) for value in values if value is not None]
    names = in_order(set(by_value if len(by_value) == len(cells) else cells))
    if len(names) < 2:
        raise DataError(
            f"{table.name}: every label in column {column!r} is {quoted(names[0])}; expected two classes or more"
        )
    if len(cells) >= 10 and len(names) > len(cells) // 2:
        raise DataError(
            f"{table.name}: column {column!r} has {len(names):,} different values in {len(cells):,} rows, which is no "
            'class label; name the label\'s column, or predict the quantity: data.task = "regression"'
        )
    return tuple(names)


def quantities(table: TextTable, column: str) -> npt.NDArray[np.float64]:
    """The numbers of the label's column, to predict as such.

    Raises:
        DataError: a label is empty or no number.
    """
    cells = table.cells(column, "the label")
    return quantities_of(cells, lambda row: table.at(row, column), table.decimal_comma)


def sites_of(cells: Sequence[str], place: Callable[[int], str]) -> tuple[Sites, tuple[str, ...]]:
    """The site [N] of each row, and the names of the sites; an error begins with the `place` of its cell.

    Raises:
        DataError: a cell is empty.
    """
    for row, cell in enumerate(cells):
        if not cell:
            raise DataError(f"{place(row)}: the site is empty; fill it in or remove the row")
    names = in_order(set(cells))
    code = {name: index for index, name in enumerate(names)}
    return np.array([code[cell] for cell in cells], np.int32), tuple(names)


def in_order(names: set[str]) -> list[str]:
    """Sorted, by value where all are numbers."""
    values = {name: number(name) for name in names}
    if any(value is None for value in values.values()):
        return sorted(names)
    return sorted(names, key=lambda name: (values[name] or 0.0, name))
