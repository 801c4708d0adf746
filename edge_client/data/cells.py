"""Cells of a table as numbers, gaps and categories, by the same rules in a simulation and on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 1e30
"""Beyond this, float32 arithmetic on squares overflows."""

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
"""Texts that stand for a missing number, in any case."""


def is_missing(cell: object) -> bool:
    """Whether the cell of a column of numbers holds no value."""
    if isinstance(cell, str):
        return cell.strip().casefold() in MISSING
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def number(cell: Any, decimal_comma: bool = False) -> float | None:
    """The number a cell holds, or None. `decimal_comma`: 1,5 is one and a half."""
    if isinstance(cell, str):
        if "_" in cell:  # Python reads 1_000; nobody else does.
            return None
        if decimal_comma and cell.count(",") == 1 and "." not in cell:
            cell = cell.replace(",", ".")
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(value) else value


def numbers(cells: Sequence[Any], decimal_comma: bool = False) -> npt.NDArray[np.float64]:
    """float64 [N]: `number` of each cell, NaN where there is none."""
    try:
        if "_" not in "".join(cells):
            return np.array(list(map(float, cells)), np.float64)
    except (TypeError, ValueError):
        pass  # a gap, a text, a decimal comma, or no strings at all
    values = (number(cell, decimal_comma) for cell in cells)
    return np.array([math.nan if value is None else value for value in values], np.float64)


def one_hot(codes: Sequence[int], categories: int) -> npt.NDArray[np.float64]:
    """[N, categories]; a row of zeros for the code -1, an empty cell."""
    hot: npt.NDArray[np.bool_] = np.asarray(codes)[:, None] == np.arange(categories)
    return hot.astype(np.float64)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def date_number(cell: object) -> float | None:
    """Days from 1970-01-01 to a date or time such as 2024-03-31, 2024-03-31T12:00 or 31.03.2024; None for other cells.

    Times without a zone are UTC.
    """
    text = str(cell).strip()
    for read in (datetime.fromisoformat, lambda each: datetime.strptime(each, "%d.%m.%Y")):
        try:
            moment = read(text)
        except ValueError:
            continue
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return (zoned - _EPOCH).total_seconds() / 86400
    return None


def folded(text: str) -> str:
    """The text in lower case, with one blank between words: spellings that mean the same are equal."""
    return " ".join(text.split()).casefold()


def kind_of(cells: Sequence[object], decimal_comma: bool = False) -> str:
    """What the cells of a column are, for people: whole numbers, numbers, true or false, dates, text, or empty; and whether some are missing."""
    present = [cell for cell in cells if not is_missing(cell)]
    if not present:
        return "empty"
    checks: Mapping[str, Callable[[object], bool]] = {
        "true or false": _is_truth,
        "whole numbers": lambda cell: _is_number(cell, decimal_comma, whole=True),
        "numbers": lambda cell: _is_number(cell, decimal_comma),
        "dates": _is_date,
    }
    kind = next((kind for kind, fits in checks.items() if all(map(fits, present))), "text")
    return kind if len(present) == len(cells) else f"{kind}, with gaps"


def _is_truth(cell: object) -> bool:
    return isinstance(cell, bool) or (isinstance(cell, str) and cell.strip().lower() in ("true", "false"))


def _is_number(cell: object, decimal_comma: bool, whole: bool = False) -> bool:
    value = None if isinstance(cell, bool) else number(cell, decimal_comma)
    return value is not None and (not whole or value.is_integer())


def _is_date(cell: object) -> bool:
    return date_number(cell) is not None
