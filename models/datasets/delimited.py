"""A delimited text file (CSV) as a table of strings, each row with its line in the file.

The standard library's reader does the quoting; around it stand the checks it leaves out, because a person
who meets a broken table needs the file, the line and the column.
"""

from __future__ import annotations

import codecs
import csv
import io
from dataclasses import dataclass
from pathlib import Path

from edge_client.files import read_regular
from models.datasets.dataset import DataError
from models.datasets.quoting import column_name, column_names, nearest_column, one_byte, quoted

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}


@dataclass(frozen=True)
class Table:
    """Cells without surrounding blanks. `lines[i]` is the line of the file on which row i begins, from 1."""

    path: Path
    columns: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]
    delimiter: str

    def __len__(self) -> int:
        return len(self.rows)

    def cells(self, column: str, purpose: str) -> list[str]:
        """One column from top to bottom.

        Raises:
            DataError: there is none of that name; `purpose` says what it was wanted for.
        """
        if column not in self.columns:
            raise DataError(
                f"{self.path}: no column {column!r} for {purpose}{nearest_column(column, self.columns)}; "
                f"{column_names(self.columns)}"
            )
        place = self.columns.index(column)
        return [row[place] for row in self.rows]

    def at(self, row: int, column: str) -> str:
        """Where a cell stands, to begin an error message with."""
        return f"{self.path}, line {self.lines[row]}, {column_name(column, self.columns)}"


def read(path: Path) -> Table:
    """The table in `path`: UTF-8 (or UTF-16 with its mark), separated by commas, semicolons or tabs.

    Raises:
        DataError: naming the file, the line and the column.
    """
    text = _decoded(path)
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DataError(
            f"{path}, line {line}: holds a zero byte, so it is no text; save the table as CSV in UTF-8"
        )
    delimiter = _delimiter(text)
    records = _records(text, delimiter, path)
    if not records:
        raise DataError(f"{path}: is empty, expected a line of column names and rows below it")
    (_, header), *body = records
    columns = _columns(header, path)
    for line, cells in body:
        if len(cells) != len(columns):
            raise DataError(_wrong_count(path, line, cells, columns, delimiter))
    if not body:
        raise DataError(f"{path}: has column names but no rows")
    return Table(path, columns, [cells for _, cells in body], [line for line, _ in body], delimiter)


def _decoded(path: Path) -> str:
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; `path` names the table to read") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec skips a byte order mark and counts from behind it.
        skipped = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
        before = content[: error.start + skipped]
        start = before.rfind(b"\n") + 1
        line, column = before.count(b"\n") + 1, len(before[start:].decode("utf-8-sig", "replace")) + 1
        raise DataError(
            f"{path}, line {line}, column {column}: {one_byte(content[len(before)])} is not "
            "UTF-8; save the table as UTF-8 (spreadsheets call it 'CSV UTF-8')"
        ) from error


def _delimiter(text: str) -> str:
    """The delimiter that splits the first line into most names; a comma when none does."""
    first = next((line for line in text.splitlines() if line.strip()), "")[: csv.field_size_limit()]
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([first], delimiter=delimiter), [])))


def _records(text: str, delimiter: str, path: Path) -> list[tuple[int, list[str]]]:
    """(line on which it begins, cells) of every record that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    records: list[tuple[int, list[str]]] = []
    line = 1
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if len(cells) > 1 or any(stripped):
                records.append((line, stripped))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(_misquoted(path, text, line, reader.line_num, delimiter, str(error))) from None
    return records


def _misquoted(path: Path, text: str, begins: int, stops: int, delimiter: str, problem: str) -> str:
    """What is wrong with the record that begins on one line, and could not be read on from another."""
    rest = "".join(io.StringIO(text, newline="").readlines()[begins - 1 : stops])
    # A lenient reader gets to the end of what is there; its last value is the one with the quote.
    place = len(next(csv.reader(io.StringIO(rest, newline=""), delimiter=delimiter), []))
    if "unexpected end of data" in problem or "field larger" in problem:
        return f"{path}, line {begins}: value {place} opens a quote that is never closed"
    began = f" (its row begins on line {begins})" if stops != begins else ""
    return f"{path}, line {stops}{began}: not valid CSV: {problem}; a quote inside a quoted value is doubled"


def _columns(header: list[str], path: Path) -> tuple[str, ...]:
    # An index written without a name is common (pandas does it); it needs one to be talked about.
    columns = tuple(name or f"column {place}" for place, name in enumerate(header, 1))
    for place, name in enumerate(columns):
        if name in columns[:place]:
            raise DataError(
                f"{path}, line 1: column name {quoted(name)} stands twice, as column {columns.index(name) + 1} and "
                f"{place + 1}; rename one"
            )
    return columns


def _wrong_count(path: Path, line: int, cells: list[str], columns: tuple[str, ...], delimiter: str) -> str:
    name = DELIMITERS[delimiter]
    amount = f"the row has {len(cells)} values for {len(columns)} columns"
    if len(cells) < len(columns):
        missing = column_name(columns[len(cells)], columns)
        return (
            f"{path}, line {line}, {missing}: nothing there, {amount}; an empty value is two {name}s in a row"
        )
    extra = cells[len(columns)]
    return (
        f"{path}, line {line}, column {len(columns) + 1}: {quoted(extra)} is beyond the last column, {amount}; "
        f"a value with a {name} in it needs quotes"
    )
