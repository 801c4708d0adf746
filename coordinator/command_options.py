"""Options that many commands have, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", envvar="FEDLOOP_DATA_DIR", help="Folder that holds the data files.", show_envvar=True
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output, nothing else there.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="key=value, a TOML value or else a string; may be repeated.", metavar="KEY=VALUE"
    ),
]
