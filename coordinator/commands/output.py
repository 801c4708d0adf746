"""Output that the commands share: JSON, tables, and formats of values."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
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
        print_output(summary)


def print_output(shown: RenderableType) -> None:
    """Prints on standard output. Nothing is cut: long cells continue below, long lines are left to the terminal."""
    console = plain_console()
    if console.is_terminal:
        words = Measurement.get(console, console.options.update(width=_PIPE_WIDTH), shown).minimum
        console.width = max(console.width, words)
    else:
        console.width = _PIPE_WIDTH
    console.print(shown, soft_wrap=True)


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: brackets are no markup, and `:key:` is no emoji."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def make_table(*columns: str, right: Collection[str] = ()) -> Table:
    """An empty table without borders. `right`: columns aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def format_time(text: str) -> str:
    """An ISO timestamp in UTC, to the minute."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def format_metric(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
