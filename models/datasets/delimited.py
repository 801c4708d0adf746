"""A CSV file in memory as a table of strings, read as a device reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_client.data.csv_file import open_table
from edge_client.data.table import Record, Table
from models.datasets.dataset import DataError


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


def read(path: Path) -> TextTable:
    """The table in `path`.

    Raises:
        DataError: naming the file, the line and the column.
    """
    with open_table(path) as table:
        records = list(table.records)
    if not records:
        raise DataError(f"{path}: has column names but no rows")
    return TextTable(table.name, table.columns, table.kinds, records, table.counted, table.delimiter)
