"""The `fedloop-edge` command.

Exit codes: 0; 2 for wrong input; 77 if the coordinator no longer accepts this device; else 1.
Modules are imported where they are used, to save memory in the daemon and start-up time in small commands.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from edge_client.commands import inspection, membership, model
from edge_client.errors import Stopped, UserError
from edge_client.transport.failures import ServerRefused, Unreachable
from edge_client.wire.strict import printable_lines

# Plain help: with rich installed, typer escapes brackets even if it does not use rich.
typer.core.HAS_RICH = False

app = typer.Typer(
    name="fedloop-edge",
    help="Takes part in federated learning with this device's own data. Begin with: fedloop-edge enroll URL TOKEN",
    no_args_is_help=True,
    suggest_commands=False,  # click does
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_GROUP: dict[str, Any] = {"no_args_is_help": True, "suggest_commands": False, "rich_markup_mode": None}
config_app = typer.Typer(help="The configuration.", **_GROUP)
data_app = typer.Typer(help="The device's data sets.", **_GROUP)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")

for command in (
    membership.enroll,
    membership.run,
    membership.relay,
    inspection.status,
    inspection.doctor,
    membership.pause,
    membership.resume,
    membership.leave,
    inspection.ledger,
    membership.opt_out,
    membership.wipe,
    membership.install_service,
    model.predict,
    model.serve_model,
):
    app.command()(command)
config_app.command("check")(inspection.config_check)
data_app.command("preview")(inspection.data_preview)


def main() -> None:
    """Runs the command; a UserError prints one message and exits with 2, never with a traceback."""
    try:
        app()
    except UserError as mistake:
        _fail(str(mistake), 2)
    except ServerRefused as refused:
        _fail(f"the coordinator refuses: {refused}", 2 if 400 <= refused.status < 500 else 1)
    except Stopped as stopped:
        from edge_client.commands.systemd_unit import REFUSED_EXIT

        _fail(str(stopped), REFUSED_EXIT)
    except Unreachable as error:
        _fail(str(error), 1)
    except sqlite3.Error as error:
        from edge_client.state import remedy

        _fail(f"the state folder's database: {error}; {remedy(error)}", 1)
    except OSError as error:
        _fail(str(error), 1)


def _show_version(requested: bool) -> None:
    if requested:
        from edge_client.daemon.host_environment import software_version

        typer.echo(f"fedloop-edge {software_version()}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the device keeps its state.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="One key of the configuration, such as limits.seconds=600."),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit."),
    ] = False,
) -> None:
    flags = [*(sets or []), *([f"state_dir={state_dir}"] if state_dir is not None else [])]
    context.obj = (config, flags)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"error: {printable_lines(message, 4_000)}\n")
    raise SystemExit(code)
