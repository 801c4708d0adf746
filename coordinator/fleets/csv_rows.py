"""The rows of a CSV file that describes simulated clients, with the numbers of their lines; what cannot be read is refused by line."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from coordinator.errors import UserError


def read_rows(
    path: Path, key: str, expected_columns: Callable[[Sequence[str]], str | None]
) -> Iterator[tuple[int, dict[str, str]]]:
    """The line number and the cells by column of each line below the header; empty lines are left out.

    `key`: of the experiment, which names the file. `expected_columns`: given the header, what is expected instead; None: it is right.

    Raises:
        UserError: the file cannot be read, or its header or the number of cells in a line is wrong.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            if (expected := expected_columns(header)) is not None:
                columns = ", ".join(header) or "none"
                raise UserError(f"{path}, line 1: the columns are {columns}; expected {expected}")
            for cells in filter(None, lines):
                if len(cells) != len(header):
                    raise UserError(
                        f"{path}, line {lines.line_num}: {len(cells)} cells, expected {len(header)}"
                    )
                yield lines.line_num, dict(zip(header, cells, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{key}: {path} cannot be read: {reason}") from None
