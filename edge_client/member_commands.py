"""`fedloop-edge enroll`, `run`, `pause`, `leave` and the like: whether and how this device takes part."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Any

import typer

from edge_client.config import FILE_VARIABLE, PREFIX, EdgeConfig, usual_file
from edge_client.errors import UserMistake
from edge_client.failures import CertificateExpired, ServerRefused, Unreachable
from edge_client.given import Sure, alone, configuration, confirm, opened, wake


def enroll(
    context: typer.Context,
    url: str,
    token: str,
    name: Annotated[str | None, typer.Option(help="For people; default: the configured name.")] = None,
    serial: Annotated[
        str | None, typer.Option(help="Of this machine, where the token admits listed machines only.")
    ] = None,
) -> None:
    """Makes this device known to a coordinator. May be repeated after an interruption.

    URL is the coordinator's device address. TOKEN is as `fedloop device token` printed it there; - reads it from
    standard input.

    Example: fedloop-edge enroll https://fed.example:8443 fl1.…
    """
    from edge_client import identity

    config = configuration(context)
    with alone(config.state_dir):
        known = identity.load(config.state_dir)
        if known is not None:
            raise UserMistake(
                f"this device is enrolled already, as {known.device} at {known.url}; `fedloop-edge leave` ends that"
            )

        def wait(seconds: float) -> None:
            typer.echo("waits for a person to approve this device: fedloop device approve", err=True)
            time.sleep(seconds)

        given = sys.stdin.readline() if token == "-" else token
        who = identity.enrol(
            config.state_dir,
            url,
            given,
            name=name or config.name,
            serial_number=serial,
            proxy=config.proxy,
            wait=wait,
        )
    typer.echo(f"enrolled as {who.device} at {who.url}; start it: fedloop-edge run")


def run(context: typer.Context) -> None:
    """Runs the daemon until it is ended. Example: fedloop-edge --config edge.toml run"""
    from edge_client import daemon

    config = configuration(context)
    with alone(config.state_dir):
        daemon.run(config)


def pause(context: typer.Context) -> None:
    """Takes on no work until `resume`; what runs now is stopped and given back. Example: fedloop-edge pause"""
    _set_paused(context, True)
    typer.echo("paused; `fedloop-edge resume` goes on")


def resume(context: typer.Context) -> None:
    """Takes on work again. Example: fedloop-edge resume"""
    _set_paused(context, False)
    typer.echo("resumed")


def leave(context: typer.Context, sure: Sure = False) -> None:
    """Ends this device's membership: tells the coordinator, then removes key, certificate and files of runs.

    The ledger is kept. Example: fedloop-edge leave --yes
    """
    from edge_client import identity

    config = configuration(context)
    with alone(config.state_dir):
        try:
            who = identity.load(config.state_dir)
        except UserMistake as damaged:
            typer.echo(f"{damaged}", err=True)
            confirm(sure, "Remove what is left of this device's identity?")
            where = "the coordinator, which was not told"
        else:
            if who is None:
                raise UserMistake("this device is not enrolled")
            confirm(sure, f"Leave {who.url} and remove this device's key?")
            _tell_leaving(config, who)
            where = who.url
        _wipe_work(config)
        identity.wipe(config.state_dir)
    typer.echo(f"left {where}; the ledger is kept: fedloop-edge ledger")


def opt_out(
    context: typer.Context,
    run_name: Annotated[str, typer.Argument(metavar="RUN")],
    undo: Annotated[bool, typer.Option("--undo", help="Take part again.")] = False,
) -> None:
    """Takes no part in a run from now on; results of it that wait are thrown away.

    RUN is the name or the id of a run. Example: fedloop-edge opt-out digits
    """
    config = configuration(context)
    with opened(config) as state:
        state.set_opted_out(run_name, not undo)
    wake(config)
    typer.echo(f"takes part in {run_name} again" if undo else f"takes no part in {run_name}")


def wipe(context: typer.Context, sure: Sure = False) -> None:
    """Removes all files of runs, results that wait and the client rules' states; identity and ledger stay.

    Example: fedloop-edge wipe --yes
    """
    config = configuration(context)
    with alone(config.state_dir):
        confirm(sure, "Remove all files of runs, also results that were not delivered yet?")
        _wipe_work(config)
    typer.echo("removed")


def install_service(
    context: typer.Context,
    user: Annotated[bool, typer.Option("--user", help="For this user.")] = False,
    system: Annotated[bool, typer.Option("--system", help="For the machine; needs root.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Print the unit, install nothing.")] = False,
) -> None:
    """Installs the daemon as a systemd service. Example: fedloop-edge install-service --user"""
    from edge_client import service

    if user == system:
        raise UserMistake("give exactly one of --user and --system")
    scope: service.Scope = "user" if user else "system"
    file, sets = context.obj
    text = service.unit(scope, configuration(context), file or usual_file(os.environ), sets)
    for variable in sorted(each for each in os.environ if each.startswith(PREFIX) and each != FILE_VARIABLE):
        typer.echo(f"note: {variable} is set here and not for the service; put it into its file", err=True)
    if only_print:
        typer.echo(text, nl=False)
        return
    path = service.install(scope, text)
    flag = "--user " if user else ""
    typer.echo(f"{path} installed; start it: systemctl {flag}enable --now fedloop-edge")
    if system:
        typer.echo(
            "it runs as a user of its own: the data sets must be readable for it, by their mode or by "
            "SupplementaryGroups= in `systemctl edit fedloop-edge`"
        )


def _set_paused(context: typer.Context, paused: bool) -> None:
    config = configuration(context)
    with opened(config) as state:
        state.set_paused(paused)
    wake(config)


def _tell_leaving(config: EdgeConfig, who: Any) -> None:
    """It leaves all the same where nobody hears it."""
    from edge_client.link import Link, pinned

    link = Link(who.url, pinned(who.ca_pem, who.credentials), proxy=config.proxy)
    try:
        link.post("/leave", {})
    except (Unreachable, ServerRefused, CertificateExpired) as error:
        typer.echo(f"the coordinator was not told: {error}", err=True)
    finally:
        link.close()


def _wipe_work(config: EdgeConfig) -> None:
    from edge_client import daemon

    daemon.wipe(config)
