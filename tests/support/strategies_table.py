"""Writes the tables of strategies and of codes in the documentation anew: `python -m tests.support.strategies_table`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from strategies import catalogue

_DOCS = Path(__file__).parents[2] / "docs"
TABLES: dict[Path, tuple[str, Callable[[], str]]] = {
    _DOCS / "strategies.md": ("strategies", catalogue.to_markdown),
    _DOCS / "update-compression.md": ("codes", catalogue.codes_to_markdown),
}
"""By page: the name between its markers, and what writes the table."""


def with_table(path: Path) -> str:
    """The page with the table as the code has it."""
    name, write = TABLES[path]
    table = re.compile(rf"(<!-- {name}: .*? -->\n\n).*?(\n?<!-- /{name} -->)", re.DOTALL)
    return table.sub(lambda found: f"{found[1]}{write()}\n\n<!-- /{name} -->", path.read_text("utf-8"))


if __name__ == "__main__":
    for page in TABLES:
        page.write_text(with_table(page), "utf-8")
