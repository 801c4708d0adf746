"""`fedloop docs`: the documentation, read without a network.

The wheel carries the pages in `coordinator/docs`; a checkout has them in `docs`. Reference pages are generated when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console

from coordinator.errors import UserError
from strategies.suggestions import suggest

_PACKAGE = Path(__file__).resolve().parents[2]
_SITE_ONLY = ("index.md", "reference")
"""What only the site needs (`make docs`)."""


def docs(
    context: typer.Context,
    page: Annotated[
        str | None,
        typer.Argument(metavar="PAGE", help="A page, such as real-fleet. Default: list all pages."),
    ] = None,
) -> None:
    """Read the documentation, which is installed with Fedloop."""
    pages = _pages(documentation_folder()) | _reference(context.find_root().command)
    if page is None:
        width = max(map(len, pages))
        lines = [f"{name:{width}}  {_title(read())}" for name, read in pages.items()]
        typer.echo("\n".join([*lines, "", "fedloop docs PAGE shows one of them."]))
        return
    read = pages.get(page.removeprefix("docs/").removesuffix(".md"))
    if read is None:
        raise UserError(f"no page is named {page!r}{suggest(page, pages)}; `fedloop docs` lists all pages")
    text = read()
    console = Console(emoji=False)
    if not console.is_terminal:
        typer.echo(text, nl=False)  # laid out, it would be cut to a width that nobody has
        return
    from coordinator.commands.information.markdown_page import MarkdownPage

    with console.pager(styles=True):
        console.print(MarkdownPage(text))


def _pages(folder: Path) -> dict[str, Callable[[], str]]:
    paths = [
        path.relative_to(folder)
        for pattern in ("*.md", "*.ipynb", "*/*.md")
        for path in sorted(folder.glob(pattern))
    ]
    return {
        path.with_suffix("").as_posix(): partial(_read, folder / path)
        for path in paths
        if path.parts[0] not in _SITE_ONLY
    }


def _reference(fedloop: click.Command) -> dict[str, Callable[[], str]]:
    from coordinator.reference import pages

    return {f"{pages.FOLDER}/{name}": make for name, make in pages.pages({"fedloop": fedloop}).items()}


def _read(path: Path) -> str:
    """A page in Markdown; the cells of a notebook without their outputs."""
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(
        source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells
    )


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")


def documentation_folder() -> Path:
    """The folder of the installed pages. Raises UserError where an installation lacks them."""
    for folder in (_PACKAGE / "docs", _PACKAGE.parent / "docs"):
        if (folder / "experiment.md").is_file():
            return folder
    raise UserError(
        f"the documentation is missing from this installation, expected in {_PACKAGE / 'docs'}; reinstall fedloop"
    )
