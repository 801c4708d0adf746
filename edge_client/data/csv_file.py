"""CSV files: a line of column names, values between commas, semicolons or tabs; the one reader of them.

Text is UTF-8, with or without a byte order mark, or UTF-16 with one. The delimiter is the one that splits the first
line into most names. Between other delimiters than commas 1,5 is one and a half. The standard library's reader does the
quoting; around it stand the checks it leaves out, because a person who meets a broken table needs the file, the line
and the column. Rows are read one at a time, so a file of any size can be read.
"""

from __future__ import annotations

import codecs
import csv
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from edge_client.data.connector import Connector, DataConfig, DataProblem
from edge_client.data.options import TableOptions, read_only_problem, read_options
from edge_client.data.quoting import column_name, one_byte, quoted
from edge_client.data.rows import Rows, files_connector
from edge_client.data.table import Record, Table
from edge_client.data.table_reader import read_rows
from edge_client.files import READ_LIMIT_BYTES, open_regular

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class CsvOptions(TableOptions):
    """Options of CSV files.

    Attributes:
        delimiter: one character; default: the one that fits the first line.
        encoding: such as "latin-1"; default: UTF-8, or UTF-16 with a byte order mark.
        schema_encoding: that of the table that the model was trained on, for a file whose own encoding is not given.
    """

    delimiter: str | None = None
    encoding: str | None = None
    schema_encoding: str | None = None


def open_connector(config: DataConfig) -> Connector:
    """A Connector to a CSV file."""
    options, path = read_options(CsvOptions, config)
    if options.delimiter is not None and len(options.delimiter) != 1:
        raise DataProblem(f"csv data: option delimiter is {options.delimiter!r}, expected one character")

    def rows(each: Path) -> Rows:
        with open_as(options, each) as table:
            return read_rows(table, options)

    return files_connector(options, path, rows)


def open_as(options: CsvOptions, path: Path) -> AbstractContextManager[Table]:
    """The table in `path` by the options, as `open_table`.

    Raises:
        DataProblem: as `open_table`; or the text is UTF-8, and only the model's schema says that it is not.
    """
    encoding = options.encoding or options.schema_encoding
    if encoding and not options.encoding:
        _require_as_in_schema(path, encoding)
    return open_table(path, options.delimiter, encoding=encoding, limit_bytes=sys.maxsize)


def _require_as_in_schema(path: Path, encoding: str) -> None:
    """Refuses text that is UTF-8 beyond ASCII: in another encoding it reads as other letters, which no later check notices."""
    try:
        is_utf_8 = codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
    except LookupError:
        return  # refused where the table is opened
    if is_utf_8:
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_ascii = True
    try:
        with open_regular(path, sys.maxsize) as file:
            if file.peek(3)[:3] == codecs.BOM_UTF8:
                return
            while chunk := file.read(_CHUNK_BYTES):
                is_ascii = is_ascii and chunk.isascii()
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except OSError as error:
        raise read_only_problem(path, error) from None
    except UnicodeDecodeError:
        return
    if not is_ascii:
        raise DataProblem(
            f"{path}: is UTF-8, while the model's training table was {encoding}; say which this file is: the option "
            'encoding = "utf-8" of a device\'s data set, --encoding utf-8 of a command, or data.encoding = "utf-8"'
        )


@contextmanager
def open_table(
    path: Path,
    delimiter: str | None = None,
    *,
    encoding: str | None = None,
    limit_bytes: int = READ_LIMIT_BYTES,
) -> Iterator[Table]:
    """The table in `path`, whose records are read as they are taken: cells without surrounding blanks.

    Raises:
        DataProblem: naming the file, the line and the column; here, or while records are taken.
    """
    try:
        with open_regular(path, limit_bytes) as file:
            used = _encoding(file.peek(3)[:3], encoding)
            with TextIOWrapper(file, encoding=used, newline="") as text:
                yield _table(path, text, delimiter)
    except OSError as error:
        raise read_only_problem(path, error) from None
    except UnicodeDecodeError:
        raise _undecodable(path, used) from None


def _encoding(start: bytes, given: str | None) -> str:
    """The encoding of a text that begins with `start`: a byte order mark tells, else the option, else UTF-8.

    Raises:
        DataProblem: there is no such encoding.
    """
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if not given or start == codecs.BOM_UTF8:
        return "utf-8-sig"
    try:
        codecs.getincrementaldecoder(given)
        b"a".decode(given)  # not so by codecs that are no text, such as hex
    except (LookupError, UnicodeError):
        raise DataProblem(
            f"option encoding is {given!r}, expected the name of a text encoding such as latin-1 or cp1252"
        ) from None
    return given


def _table(path: Path, text: TextIOWrapper, delimiter: str | None) -> Table:
    first: list[str] = []
    for line in text:
        first.append(line)
        if line.strip():
            break
    delimiter = delimiter or _delimiter("".join(first[-1:]))
    records = _records(path, chain(first, text), delimiter)
    line_number, header = next(records, (1, []))
    if not header:
        raise DataProblem(f"{path}: is empty, expected a line of column names and rows below it")
    # An index written without a name is common (pandas does it); it needs one to be talked about.
    columns = tuple(name or f"column {place}" for place, name in enumerate(header, 1))
    for place, name in enumerate(columns):
        if name in columns[:place]:
            raise DataProblem(
                f"{path}, line {line_number}: column name {quoted(name)} stands twice, as column {columns.index(name) + 1} and "
                f"{place + 1}; rename one"
            )
    return Table(str(path), columns, (), _complete(path, records, columns, delimiter), "line", delimiter)


def _delimiter(line: str) -> str:
    """The delimiter that splits a line into most names; a comma when none does."""
    first = line[: csv.field_size_limit()]
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([first], delimiter=delimiter), [])))


def _records(path: Path, text: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(line on which it begins, cells) of every record that is not blank."""
    record_lines: list[str] = []
    reader = csv.reader(_lines(path, text, record_lines), delimiter=delimiter, strict=True)
    begins = 1
    try:
        for cells in reader:
            stripped = list(map(str.strip, cells))
            if len(cells) > 1 or any(stripped):
                yield begins, stripped
            begins = reader.line_num + 1
            record_lines.clear()
    except csv.Error as error:
        raise _misquoted(path, begins, record_lines, delimiter, str(error)) from None


def _lines(path: Path, text: Iterator[str], record_lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(text, 1):
        if "\0" in line:
            raise DataProblem(
                f"{path}, line {number}: holds a zero byte, so it is no text; save the table as CSV in UTF-8"
            )
        record_lines.append(line)
        yield line


def _complete(
    path: Path, records: Iterator[tuple[int, list[str]]], columns: tuple[str, ...], delimiter: str
) -> Iterator[Record]:
    for line, cells in records:
        if len(cells) != len(columns):
            raise _wrong_count(path, line, cells, columns, delimiter)
        yield line, cells


def _misquoted(path: Path, begins: int, lines: list[str], delimiter: str, problem: str) -> DataProblem:
    """What is wrong with the record that begins on one line and cannot be read beyond the last of `lines`."""
    # A lenient reader gets to the end of what is there; its last value is the one with the quote.
    place = len(next(csv.reader(lines, delimiter=delimiter), []))
    if "unexpected end of data" in problem or "field larger" in problem:
        return DataProblem(f"{path}, line {begins}: value {place} opens a quote that is never closed")
    stops = begins + len(lines) - 1
    began = f" (its row begins on line {begins})" if stops != begins else ""
    return DataProblem(
        f"{path}, line {stops}{began}: not valid CSV: {problem}; a quote inside a quoted value is doubled"
    )


def _wrong_count(
    path: Path, line: int, cells: list[str], columns: tuple[str, ...], delimiter: str
) -> DataProblem:
    name = DELIMITERS.get(delimiter, repr(delimiter))
    count = f"the row has {len(cells)} values for {len(columns)} columns"
    if len(cells) < len(columns):
        missing = column_name(columns[len(cells)], columns)
        return DataProblem(
            f"{path}, line {line}, {missing}: nothing there, {count}; an empty value is two {name}s in a row"
        )
    extra = quoted(cells[len(columns)])
    return DataProblem(
        f"{path}, line {line}, column {len(columns) + 1}: {extra} is beyond the last column, {count}; "
        f"a value with a {name} in it needs quotes"
    )


def _undecodable(path: Path, encoding: str) -> DataProblem:
    """The first place in a file that is not text, found by reading it again."""
    decoder: Any = codecs.getincrementaldecoder(encoding)()
    line, column = 1, 1
    byte = 0
    with open_regular(path, sys.maxsize) as file:
        try:
            while chunk := file.read(_CHUNK_BYTES):
                line, column = _after(decoder.decode(chunk), line, column)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode(encoding, "replace")
            line, column = _after(before, line, column)
            byte = error.object[error.start]
    return DataProblem(
        f"{path}, line {line}, column {column}: {one_byte(byte)} is not {encoding.upper().removesuffix('-SIG')}; save the "
        "table as UTF-8 (spreadsheets call it 'CSV UTF-8'), or say what it is, such as encoding = \"latin-1\", or --encoding latin-1 of a command"
    )


def _after(text: str, line: int, column: int) -> tuple[int, int]:
    """The place behind `text`, which begins at a place."""
    lines = text.count("\n")
    return (line + lines, len(text) - text.rfind("\n")) if lines else (line, column + len(text))
