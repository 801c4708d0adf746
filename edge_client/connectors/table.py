"""A stream of table rows as arrays, a block at a time: whatever the file's size, little of it is held as text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.connectors.connector import DataProblem
from edge_client.connectors.options import TableOptions
from edge_client.connectors.rows import Rows, class_index, scaled, shaped

BLOCK_ROWS = 4096

Record = tuple[int, Sequence[Any]]
"""Where a row stands (a line or a row number), and its cells in the order of the columns."""


@dataclass(frozen=True)
class Table:
    """A source of rows.

    Attributes:
        name: of file or query, begins every error.
        columns: names in the order of cells. kinds: of each, for the preview.
        counted: what the number of a record counts, `line` or `row`.
    """

    name: str
    columns: tuple[str, ...]
    kinds: tuple[str, ...]
    records: Iterable[Record]
    counted: str

    def place(self, number: int, column: str) -> str:
        return f"{self.name}, {self.counted} {number}, column {column!r}"


def read_rows(table: Table, options: TableOptions) -> Rows:
    """All rows of a table.

    A cell is a number or text that reads as one; in Parquet it may be a list of numbers. A gap is refused, unless
    columns are standardised, where it becomes their mean.

    Raises:
        DataProblem: naming file, line or row, column, the value and what was expected.
    """
    label = _column(table, options.label, "label")
    split = _column(table, options.split, "split") if options.split is not None else None
    taken = {label, split}
    features = [_column(table, name, "features") for name in options.features] or [
        index for index in range(len(table.columns)) if index not in taken
    ]
    _require_features(table, features, taken)
    parse = _Parser(table, options, label, split, features)
    blocks = list(map(parse.block, _blocks(table.records)))
    if not blocks:
        raise DataProblem(f"{table.name}: has columns but no rows")
    return parse.rows(blocks)


Block = tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class _Parser:
    table: Table
    options: TableOptions
    label: int
    split: int | None
    features: Sequence[int]

    def block(self, records: Sequence[Record]) -> Block:
        values = [self._values(number, cells) for number, cells in records]
        widths = {len(row) for row in values}
        if len(widths) > 1:
            odd = next(i for i, row in enumerate(values) if len(row) != len(values[0]))
            raise DataProblem(
                f"{self.table.name}, {self.table.counted} {records[odd][0]}: holds {len(values[odd])} values, "
                f"the rows before it {len(values[0])}"
            )
        x = np.asarray(values, np.float64)
        self._require_numbers(x, records)
        y = [self._label(number, cells) for number, cells in records]
        test = [self._is_test(number, cells) for number, cells in records]
        return self._typed(x), np.asarray(y, np.int32), np.asarray(test, np.bool_)

    def rows(self, blocks: Sequence[Block]) -> Rows:
        widths = {block[0].shape[1] for block in blocks}
        if len(widths) > 1:
            raise DataProblem(f"{self.table.name}: rows hold {' or '.join(map(str, sorted(widths)))} values")
        x = np.concatenate([block[0] for block in blocks])
        return Rows(
            x=scaled(shaped(x, self.options.shape, self.table.name), self.options.scale),
            y=np.concatenate([block[1] for block in blocks]),
            test=np.concatenate([block[2] for block in blocks]) if self.split is not None else None,
            schema=tuple(zip(self.table.columns, self.table.kinds, strict=True)),
        )

    def _values(self, number: int, cells: Sequence[Any]) -> list[float]:
        try:
            return [float(cells[index]) for index in self.features]
        except (TypeError, ValueError, OverflowError):
            return [value for index in self.features for value in self._cell(number, index, cells[index])]

    def _cell(self, number: int, index: int, cell: Any) -> list[float]:
        """The values of one cell, for rows with a gap, a list or a mistake; NaN for a gap."""
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            return [np.nan]
        try:
            return [float(part) for part in cell] if isinstance(cell, list | tuple) else [float(cell)]
        except (TypeError, ValueError, OverflowError):
            place = self.table.place(number, self.table.columns[index])
            raise DataProblem(
                f"{place}: {_short(cell)} is no number; correct it, or leave the column out by the option features"
            ) from None

    def _require_numbers(self, x: npt.NDArray[np.float64], records: Sequence[Record]) -> None:
        """No gap where none is allowed, no infinity, nothing that the dtype cannot hold."""
        whole = self.options.dtype == "int32"
        wrong = np.isinf(x) | (np.abs(x) > (2**31 - 1 if whole else np.finfo(np.float32).max))
        if self.options.standardise == "none":
            wrong |= np.isnan(x)
        if whole:
            wrong |= x != np.floor(x)
        if not wrong.any():
            return
        row, value = (int(index) for index in np.argwhere(wrong)[0])
        # Cells that are lists make values more than columns; then the first column is named.
        plain = x.shape[1] == len(self.features)
        place = self.table.place(records[row][0], self.table.columns[self.features[value if plain else 0]])
        if np.isnan(x[row, value]):
            raise DataProblem(
                f'{place}: no value there; fill it in, remove the row, or set standardise = "local", which fills gaps'
            )
        kind = "a whole number of 32 bits" if whole else "a finite number"
        raise DataProblem(f"{place}: {x[row, value]:g} is not {kind}")

    def _typed(self, x: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        return x.astype(np.int32 if self.options.dtype == "int32" else np.float32)

    def _label(self, number: int, cells: Sequence[Any]) -> int:
        place = self.table.place(number, self.table.columns[self.label])
        return class_index(cells[self.label], self.options.classes, place)

    def _is_test(self, number: int, cells: Sequence[Any]) -> bool:
        if self.split is None:
            return False
        said = str(cells[self.split]).strip().lower()
        if said not in ("train", "test"):
            place = self.table.place(number, self.table.columns[self.split])
            raise DataProblem(f"{place}: {_short(cells[self.split])}, expected train or test")
        return said == "test"


def _blocks(records: Iterable[Record]) -> Iterable[list[Record]]:
    stream = iter(records)
    while block := list(islice(stream, BLOCK_ROWS)):
        yield block


def _column(table: Table, name: str, option: str) -> int:
    if not name:
        raise DataProblem(
            f"{table.name}: the option {option} is missing; it names one of {', '.join(table.columns)}"
        )
    if name not in table.columns:
        close = difflib.get_close_matches(name, table.columns, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise DataProblem(
            f"{table.name}: no column {name!r} for the option {option}{hint}; its columns: {', '.join(table.columns)}"
        )
    return table.columns.index(name)


def _require_features(table: Table, features: Sequence[int], taken: set[int | None]) -> None:
    both = [table.columns[index] for index in features if index in taken]
    if both:
        raise DataProblem(
            f"{table.name}: column {both[0]!r} is label or split and cannot be one of the features"
        )
    if not features:
        raise DataProblem(f"{table.name}: no column is left for the features beside the label")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
