"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command_group(help_text: str) -> typer.Typer:
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        suggest_commands=False,  # click does
        rich_markup_mode="rich",
    )


DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", envvar="FEDLOOP_DATA_DIR", help="Folder that holds the data files.", show_envvar=True
    ),
]
ExperimentFile = Annotated[
    Path | None,
    typer.Argument(
        help="Experiment file (TOML); without one, the defaults: digits.", metavar="[EXPERIMENT.toml]"
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for the results; new or empty. Default: runs/<name>-<time>."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output, nothing else there.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="key=value; the value is TOML, else a string; may be repeated.", metavar="KEY=VALUE"
    ),
]
