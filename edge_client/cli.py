"""The `fedloop-edge` command.

Exit codes: 0; 2 for a mistake in what was given; 77 where the coordinator takes this device no more; else 1.
Modules are imported where they are used: the daemon's memory counts, and so does the start of a small command.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import typer.core

from edge_client import look_commands, member_commands, model_commands
from edge_client.errors import Stopped, UserMistake
from edge_client.failures import ServerRefused, Unreachable

# Plain help: with rich installed typer escapes brackets for it although it does not print by it.
typer.core.HAS_RICH = False

app = typer.Typer(
    name="fedloop-edge",
    help="Takes part in federated learning with this device's own data. Begin with: fedloop-edge enroll URL TOKEN",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="The configuration.", no_args_is_help=True, rich_markup_mode=None)
data_app = typer.Typer(help="The device's data sets.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")

for command in (
    member_commands.enroll,
    member_commands.run,
    look_commands.status,
    look_commands.doctor,
    member_commands.pause,
    member_commands.resume,
    member_commands.leave,
    look_commands.ledger,
    member_commands.opt_out,
    member_commands.wipe,
    member_commands.install_service,
    model_commands.predict,
    model_commands.serve_model,
):
    app.command()(command)
config_app.command("check")(look_commands.config_check)
data_app.command("preview")(look_commands.data_preview)


def main() -> None:
    """Runs the command; a person's mistake is one message and exit code 2, never a traceback."""
    try:
        app()
    except UserMistake as mistake:
        _fail(str(mistake), 2)
    except ServerRefused as refused:
        _fail(f"the coordinator refuses: {refused}", 2 if 400 <= refused.status < 500 else 1)
    except Stopped as stopped:
        from edge_client.service import REFUSED_EXIT

        _fail(str(stopped), REFUSED_EXIT)
    except Unreachable as error:
        _fail(str(error), 1)
    except sqlite3.Error as error:
        _fail(f"the state folder's database: {error}; is its disk full? fedloop-edge doctor looks", 1)
    except OSError as error:
        _fail(str(error), 1)


@app.callback()
def _options(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the device keeps its state.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="One key of the configuration, such as limits.seconds=600."),
    ] = None,
) -> None:
    flags = [*(sets or []), *([f"state_dir={state_dir}"] if state_dir is not None else [])]
    context.obj = (config, flags)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(code)
