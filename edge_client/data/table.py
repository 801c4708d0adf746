"""A table as a stream of rows, whatever it is read from, and the columns of a block of rows as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.cells import LARGEST, date_number, folded, is_missing, numbers, one_hot
from edge_client.data.connector import DataProblem
from edge_client.data.options import TableOptions
from edge_client.data.quoting import column_name, column_names, is_content_hidden, listed, quoted
from strategies.suggestions import suggest

BLOCK_ROWS = 4096

Record = tuple[int, Sequence[Any]]
"""The place of a row (a line or a row number), and its cells in the order of the columns."""


@dataclass(frozen=True)
class Table:
    """A source of rows.

    Attributes:
        name: of file or query, begins every error.
        columns: names in the order of cells.
        kinds: of each column, for the preview; empty where the source has none, and values tell.
        counted: what the number of a record counts, `line` or `row`.
        delimiter: of a text file; None of other sources.
    """

    name: str
    columns: tuple[str, ...]
    kinds: tuple[str, ...]
    records: Iterable[Record]
    counted: str
    delimiter: str | None = None

    @property
    def decimal_comma(self) -> bool:
        """Whether 1,5 is one and a half: where commas do not separate values."""
        return self.delimiter not in (None, ",")

    def index(self, column: str, purpose: str) -> int:
        """The place of a column.

        Raises:
            DataProblem: no column has that name; `purpose` says what it was wanted for.
        """
        if column not in self.columns:
            raise DataProblem(
                f"{self.name}: no column {column!r} for {purpose}{suggest_column(column, self.columns)}; "
                f"{column_names(self.columns)}"
            )
        return self.columns.index(column)

    def place(self, number: int, column: str) -> str:
        """The place of a cell, to begin an error message with."""
        return f"{self.name}, {self.counted} {number}, {column_name(column, self.columns)}"


@dataclass(frozen=True)
class Column:
    """Cells from top to bottom, and the number of the line or row of each."""

    table: Table
    name: str
    cells: Sequence[Any]
    rows: Sequence[int]

    def place(self, row: int) -> str:
        """The place of one of the cells, to begin an error message with."""
        return self.table.place(self.rows[row], self.name)

    def problem(self, row: int, problem: str) -> DataProblem:
        """The error for one of the cells."""
        return DataProblem(f"{self.place(row)}: {problem}")


def feature(column: Column, options: TableOptions) -> npt.NDArray[np.float64]:
    """[N, values]: one value a row, but for categories, and lists of numbers in Parquet; NaN for a gap."""
    categories = options.categories.get(column.name)
    if categories is not None:
        other, fold = (column.name in names for names in (options.other, options.fold))
        return _one_hot(column, categories, other=other, fold=fold, closed=options.closed)
    return _dates(column, options) if column.name in options.dates else _numbers(column, options)


def held_out(column: Column) -> npt.NDArray[np.bool_]:
    """[N], True where the column says test."""
    parts = [str(cell).strip().casefold() for cell in column.cells]
    for row, part in enumerate(parts):
        if part not in ("train", "test"):
            raise column.problem(
                row,
                f"{quoted(part)} is neither train nor test{suggest(part, ('train', 'test'))}; if the "
                'column is no split, name another one or set split = ""',
            )
    return np.array([part == "test" for part in parts], np.bool_)


def _one_hot(
    column: Column, categories: Sequence[str], *, other: bool, fold: bool, closed: bool
) -> npt.NDArray[np.float64]:
    spelled = folded if fold else str.strip
    codes = {spelled(name): code for code, name in enumerate(categories)} | {"": -1}
    texts = ["" if cell is None else spelled(str(cell)) for cell in column.cells]
    for row, text in enumerate(texts):
        if text not in codes and not other:
            raise column.problem(row, _unknown_text(text, categories, closed=closed))
    return one_hot([codes.get(text, len(categories)) for text in texts], len(categories) + other)


def _unknown_text(text: str, categories: Sequence[str], *, closed: bool) -> str:
    """`closed`: by a model's schema, else by the options of a data set."""
    hint = suggest(text, categories)
    if closed:
        return (
            f"{quoted(text)} did not occur in this column in training, and the model has no value for other texts{hint}; it "
            f"knows: {listed(categories)}; correct the cell, empty it, or remove the row"
        )
    return (
        f"{quoted(text)} is none of the option categories{hint}: {listed(categories)}; correct the cell, add the text to "
        "categories, or name the column in the option other"
    )


def _dates(column: Column, options: TableOptions) -> npt.NDArray[np.float64]:
    """Days since 1970-01-01."""
    values = np.full((len(column.cells), 1), np.nan)
    for row, cell in enumerate(column.cells):
        if not is_missing(cell):
            days = date_number(cell)
            if days is None:
                raise column.problem(
                    row, f"{quoted(str(cell))} is not a date; expected 2024-03-31 or 31.03.2024"
                )
            values[row] = days
    _require_in_range(values, column, options)
    return values


def _numbers(column: Column, options: TableOptions) -> npt.NDArray[np.float64]:
    values = numbers(column.cells, column.table.decimal_comma)[:, None]
    gaps = np.flatnonzero(np.isnan(values)).tolist()
    if any(isinstance(column.cells[row], list | tuple) for row in gaps):
        values = _lists(column)
    else:
        for row in gaps:
            if not is_missing(column.cells[row]):
                raise _no_number(column, row)
    _require_in_range(values, column, options)
    return values


def _lists(column: Column) -> npt.NDArray[np.float64]:
    """The values of cells that are lists of numbers, all of one length."""
    rows: list[list[float]] = []
    for row, cell in enumerate(column.cells):
        try:
            rows.append([float(part) for part in (cell if isinstance(cell, list | tuple) else [cell])])
        except (TypeError, ValueError, OverflowError):
            raise _no_number(column, row) from None
        if len(rows[-1]) != len(rows[0]):
            raise column.problem(row, f"holds {len(rows[-1])} values, the rows before it {len(rows[0])}")
    return np.array(rows, np.float64)


def _no_number(column: Column, row: int) -> DataProblem:
    return column.problem(
        row,
        f"{quoted(str(column.cells[row]))} is not a number; correct it, list the texts of the column in the option "
        "categories, or leave the column out by the option features",
    )


def _require_in_range(values: npt.NDArray[np.float64], column: Column, options: TableOptions) -> None:
    """No gap where none is allowed, and nothing that the dtype cannot hold."""
    whole = options.dtype == "int32"
    wrong = np.abs(values) > (2**31 - 1 if whole else LARGEST)
    if options.standardise == "none" and column.name not in options.scaling:
        wrong |= np.isnan(values)
    if whole:
        wrong |= values != np.floor(values)
    if not wrong.any():
        return
    row, value = (int(index) for index in np.argwhere(wrong)[0])
    if np.isnan(values[row, value]):
        raise column.problem(
            row,
            "no value there; fill it in, remove the row, or have gaps filled with the mean: "
            'standardise = "local" on a device, data.scale = "federated" or "site" in an experiment',
        )
    cell = column.cells[row]
    shown = quoted(str(cell[value] if isinstance(cell, list | tuple) else cell))
    limit = "is not a whole number of 32 bits" if whole else f"is too large; expected at most {LARGEST:g}"
    raise column.problem(row, f"{shown} {limit}")


def suggest_column(name: str, columns: Sequence[str]) -> str:
    """`, did you mean …?` for the columns of a table, or an empty string."""
    return "" if is_content_hidden() else suggest(name, columns)
