"""Options that many commands share, and those of `fedloop serve`, which follow from its settings."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from coordinator.option_parsers import Address
from coordinator.settings import Settings, options


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


def serve_signature() -> inspect.Signature:
    """The parameters of `serve`, from which typer makes its options: one for each option in `Settings`."""
    defaults = {field.name: field.default for field in fields(Settings)}
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if kind is bool else None,
                annotation=Annotated[
                    _command_line_type(kind),
                    typer.Option(
                        option.flag,
                        envvar=option.variable,
                        show_envvar=option.variable is not None,
                        metavar=option.metavar,
                        help=option.help + _default_help(defaults[name]),
                    ),
                ],
            )
            for name, (kind, option) in options().items()
        ]
    )


def _command_line_type(kind: Any) -> Any:
    """Numbers and addresses arrive as text: `read_settings` then reports every bad value at once."""
    if kind is bool:
        return bool
    item = Path if Path in (kind, *get_args(kind)) else str
    return list[item] | None if get_origin(kind) is tuple else item | None  # type: ignore[valid-type]


def _default_help(default: Any) -> str:
    match default:
        case bool() | "":
            return ""
        case float():
            return f" Default: {default:g}"
        case int() | str() | Address():
            return f" Default: {default}"
    return ""
