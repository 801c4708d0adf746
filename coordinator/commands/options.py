"""Options that many commands share, the commands that call a coordinator, and the options of `fedloop serve`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.console import ConsoleRenderable

from coordinator.commands.output import print_json, print_lines, print_output
from coordinator.extras import installed_version
from coordinator.import_guard import DISTRIBUTION
from coordinator.operator.client import Coordinator, connect
from coordinator.option_parsers import Address
from coordinator.settings import Settings, options

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
"""Settings of a command whose subcommands take `-h` too."""


def show_version(requested: bool) -> None:
    """Prints the version and ends the command, if `--version` was given."""
    if requested:
        typer.echo(f"{DISTRIBUTION} {installed_version(DISTRIBUTION)}")
        raise typer.Exit


def command_group(help_text: str) -> typer.Typer:
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        suggest_commands=False,  # click does
        rich_markup_mode="rich",
    )


Shown = tuple[Any, Iterable[str] | ConsoleRenderable]
"""A document for --json, and the lines or the table that say the same."""
Remote = Callable[..., Shown]

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

FlowerApp = Annotated[
    Path | None,
    typer.Option(
        "--flower-app",
        help="Run the Flower app in this folder instead (docs/flower.md); --set may give federation.clients and "
        "simulation.workers.",
        metavar="DIR",
    ),
]
RunConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--run-config",
        help="Of a Flower app, values of its run configuration, as in `flwr run`; or one TOML file.",
        metavar="'KEY=VALUE …'",
    ),
]
Mlflow = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        help="Copy the finished run to MLflow: a tracking URI, such as sqlite:///mlflow.db.",
        metavar="URI",
    ),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard", help="Copy the finished run to TensorBoard's event files in DIR.", metavar="DIR"
    ),
]


def remote_command(app: typer.Typer, name: str | None = None, *, example: str) -> Callable[[Remote], Remote]:
    """Adds a command that calls a coordinator, with the options --coordinator and --json.

    Its function gets a client before its own parameters.
    """

    def add(function: Remote) -> Remote:
        def command(coordinator: Coordinator = None, as_json: Json = False, **values: Any) -> None:
            document, summary = function(connect(coordinator), **values)
            if as_json:
                print_json(document)
            elif isinstance(summary, ConsoleRenderable):
                print_output(summary)
            else:
                print_lines(summary)

        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        *shared, _ = inspect.signature(command, eval_str=True).parameters.values()
        options = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared)]
        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        app.command(name, epilog=f"Example: {example}")(command)
        return function

    return add


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
