"""A table as a stream of rows, whatever it is read from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.data.connector import DataProblem
from edge_client.data.quoting import column_name, column_names, nearest_column

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
                f"{self.name}: no column {column!r} for {purpose}{nearest_column(column, self.columns)}; "
                f"{column_names(self.columns)}"
            )
        return self.columns.index(column)

    def place(self, number: int, column: str) -> str:
        """The place of a cell, to begin an error message with."""
        return f"{self.name}, {self.counted} {number}, {column_name(column, self.columns)}"
