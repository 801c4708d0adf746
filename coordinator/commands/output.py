"""Output that the commands share: JSON, tables, and formats of values."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table

_PIPE_WIDTH = 2000
"""Characters a line for output that another program reads, so that nothing is cut."""


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def print_summary(document: Any, summary: RenderableType, *, as_json: bool) -> None:
    """Prints a document as JSON, or the summary of it."""
    if as_json:
        print_json(document)
    else:
        Console(soft_wrap=True).print(summary, highlight=False)


def output_console() -> Console:
    """Standard output; cut to the width of a terminal, complete into a pipe."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_PIPE_WIDTH)


def make_table(*columns: str, right: Collection[str] = (), wrap: bool = False) -> Table:
    """An empty table without borders. `right`: columns aligned to the right; `wrap`: long cells continue below."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=not wrap)
    return table


def format_time(text: str) -> str:
    """An ISO timestamp in UTC, to the minute."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def format_metric(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
