"""Cells of text as numbers: what is a quantity, what is a category, and what is a mistake."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.datasets.dataset import DataError
from models.datasets.delimited import Table
from models.datasets.quoting import quoted

CATEGORIES = 100
"""Most different texts that a column may hold and still be one-hot."""

MISTYPED = 0.05
"""Share of cells that may fail to be numbers in a column that is plainly one of numbers; they are mistakes."""

LARGEST = 1e30
"""Beyond this, float32 arithmetic on squares overflows."""

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})


@dataclass(frozen=True)
class Numbers:
    """A quantity. `values`: float64 [N], NaN where the cell is empty."""

    name: str
    values: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Categories:
    """A text column. `codes`: index into `names` [N], -1 where the cell is empty."""

    name: str
    codes: npt.NDArray[np.int64]
    names: tuple[str, ...]

    def one_hot(self) -> npt.NDArray[np.float32]:
        """[N, categories]; a row of zeros where the cell is empty."""
        hot: npt.NDArray[np.bool_] = self.codes[:, None] == np.arange(len(self.names))
        return hot.astype(np.float32)


def understood(table: Table, name: str) -> Numbers | Categories:
    """The column as numbers when nearly all of its cells are, else as categories.

    Raises:
        DataError: a stray text among numbers, a number too large, or too many categories.
    """
    cells = table.cells(name, "a feature")
    decimal_comma = table.delimiter != ","
    values = [number(cell, decimal_comma) for cell in cells]
    stray = [
        row
        for row, (cell, value) in enumerate(zip(cells, values, strict=True))
        if value is None and cell.casefold() not in MISSING
    ]
    numbers = sum(value is not None for value in values)
    # One odd cell is a mistake in a table of any size, as long as numbers are what is usual.
    if stray and (numbers <= len(stray) or len(stray) > max(1, MISTYPED * (numbers + len(stray)))):
        return _categories(table, name, cells, stray[0])
    if stray:
        raise DataError(
            f"{table.at(stray[0], name)}: {quoted(cells[stray[0]])} is not a number, as {numbers:,} of the column's "
            f"{numbers + len(stray):,} values are; correct the cell, or empty it to have it filled"
        )
    for row, value in enumerate(values):
        if value is not None and not abs(value) <= LARGEST:
            raise DataError(
                f"{table.at(row, name)}: {quoted(cells[row])} is too large; expected at most {LARGEST:g}"
            )
    return Numbers(name, np.array([math.nan if value is None else value for value in values]))


def number(cell: str, decimal_comma: bool = False) -> float | None:
    """The number a cell holds, or None. `decimal_comma`: 1,5 is one and a half."""
    if "_" in cell:  # Python reads 1_000; nobody else does.
        return None
    try:
        value = float(
            cell.replace(",", ".") if decimal_comma and cell.count(",") == 1 and "." not in cell else cell
        )
    except ValueError:
        return None
    return None if math.isnan(value) else value


def in_order(names: set[str], decimal_comma: bool = False) -> list[str]:
    """Sorted, by value where all are numbers."""
    values = {name: number(name, decimal_comma) for name in names}
    if any(value is None for value in values.values()):
        return sorted(names)
    return sorted(names, key=lambda name: (values[name] or 0.0, name))


def _categories(table: Table, name: str, cells: list[str], first: int) -> Categories:
    names = in_order({cell for cell in cells if cell})
    if len(names) > CATEGORIES:
        raise DataError(
            f"{table.at(first, name)}: {quoted(cells[first])} is not a number, and {len(names):,} different values are "
            f"too many for categories (at most {CATEGORIES}); leave the column out of the table or of `features`"
        )
    code = {category: index for index, category in enumerate(names)}
    return Categories(name, np.array([code.get(cell, -1) for cell in cells]), tuple(names))
