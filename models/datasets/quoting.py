"""What an error message shows of a file's content: a little, to whoever can read the file; nothing, to anybody else.

A person at a terminal needs the cell that is wrong. Whoever sends a path over the network must not learn what is in the
file by having it read as a table, so the coordinator loads data within `content_hidden`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from models.datasets.notation import nearest

LONGEST = 40
"""Characters shown of one text."""
MOST = 20
"""Names shown of a list."""

_hidden: ContextVar[bool] = ContextVar("hidden", default=False)


@contextmanager
def content_hidden() -> Iterator[None]:
    """Messages made meanwhile show nothing of what was read."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


def quoted(text: str) -> str:
    """A text from a file, in quotes and cut short."""
    return "a value (not shown)" if _hidden.get() else repr(_cut(text))


def column_name(name: str, columns: Sequence[str]) -> str:
    """How a message names one of the columns of a table."""
    return f"column {columns.index(name) + 1}" if _hidden.get() else f"column {_cut(name)!r}"


def column_names(columns: Sequence[str]) -> str:
    """How a message tells which columns there are."""
    if _hidden.get():
        return f"it has {len(columns)} columns"
    more = ", …" if len(columns) > MOST else ""
    return f"its columns: {', '.join(map(_cut, columns[:MOST]))}{more}"


def nearest_column(name: str, columns: Sequence[str]) -> str:
    """As `notation.nearest`, of the columns of a table."""
    return "" if _hidden.get() else nearest(name, columns)


def one_byte(value: int) -> str:
    """How a message tells of a byte."""
    return "a byte" if _hidden.get() else f"byte 0x{value:02x}"


def first_bytes(content: bytes) -> str:
    """How a message tells what a file begins with."""
    if not content:
        return "starts with nothing"
    return "starts otherwise" if _hidden.get() else f"starts with {content[:4].hex(' ')}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
