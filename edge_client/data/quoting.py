"""How much of a file's content an error message shows: a little to a person at a terminal, nothing to a remote user.

A person at a terminal needs to see the cell that is wrong. A remote user who sends a path must not learn what the file
holds from an error message, so the coordinator loads data within `content_hidden`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

MAX_CHARACTERS = 40
"""Characters shown of one text."""
MAX_NAMES = 20
"""Names shown of a list."""

_hidden: ContextVar[bool] = ContextVar("hidden", default=False)


@contextmanager
def content_hidden() -> Iterator[None]:
    """Messages made within show nothing of what was read."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


def is_content_hidden() -> bool:
    """Whether messages show nothing of what was read."""
    return _hidden.get()


def quoted(text: str) -> str:
    """A text from a file, in quotes and cut short."""
    return "a value (not shown)" if _hidden.get() else repr(_cut(text))


def column_name(name: str, columns: Sequence[str]) -> str:
    """One of the columns of a table, as a message names it."""
    return f"column {columns.index(name) + 1}" if _hidden.get() else f"column {_cut(name)!r}"


def column_names(columns: Sequence[str]) -> str:
    """The columns of a table, as a message lists them."""
    return f"it has {len(columns)} columns" if _hidden.get() else f"its columns: {listed(columns)}"


def listed(names: Sequence[str]) -> str:
    """The first names of a list, each cut short."""
    return ", ".join(map(_cut, names[:MAX_NAMES])) + (", …" if len(names) > MAX_NAMES else "")


def one_byte(value: int) -> str:
    """A byte of a file, as a message shows it."""
    return "a byte" if _hidden.get() else f"byte 0x{value:02x}"


def first_bytes(content: bytes) -> str:
    """The beginning of a file, as a message shows it."""
    if not content:
        return "starts with nothing"
    return "starts otherwise" if _hidden.get() else f"starts with {content[:4].hex(' ')}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
