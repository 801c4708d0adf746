"""Writes the table of `docs/strategies.md` anew: `python -m tests.support.strategies_table`."""

from __future__ import annotations

import re
from pathlib import Path

from strategies import catalogue

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
_TABLE = re.compile(r"(<!-- strategies: .*? -->\n\n).*?(\n?<!-- /strategies -->)", re.DOTALL)


def with_table(page: str) -> str:
    """The page with the table as the code has it."""
    return _TABLE.sub(lambda found: f"{found[1]}{catalogue.to_markdown()}\n\n<!-- /strategies -->", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
