"""Markdown as a terminal shows it. The library that parses it is imported by whoever shows a page only."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.table import Table


class _WholeTable(TableElement):
    """A table whose long words continue below, where the library would cut them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"
            yield part


class MarkdownPage(Markdown):
    """A page for a terminal."""

    elements = {**Markdown.elements, "table_open": _WholeTable}  # noqa: RUF012 - as the library declares it
