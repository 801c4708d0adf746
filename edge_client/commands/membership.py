"""`fedloop-edge enroll`, `run`, `pause`, `leave` and the like: this device's participation."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from typing import Annotated, Any

import typer

from edge_client.commands.cli_options import Sure, configuration, confirm, exclusive, wake
from edge_client.config import FILE_VARIABLE, PREFIX, EdgeConfig, default_file
from edge_client.errors import UserError
from edge_client.state import State
from edge_client.transport.failures import CertificateExpired, ServerRefused, Unreachable


def enroll(
    context: typer.Context,
    url: str,
    token: str,
    name: Annotated[str | None, typer.Option(help="For people; default: the configured name.")] = None,
    serial: Annotated[
        str | None, typer.Option(help="Of this machine, where the token admits listed machines only.")
    ] = None,
) -> None:
    """Enrols this device with a coordinator. May be repeated after an interruption.

    URL is the coordinator's device address. TOKEN is printed there by `fedloop device token`; - reads it from
    standard input.

    Example: fedloop-edge enroll https://fed.example:8443 fl1.…
    """
    from edge_client.transport import identity

    config = configuration(context)
    with exclusive(config.state_dir):
        known = identity.load(config.state_dir)
        if known is not None:
            raise UserError(
                f"this device is already enrolled, as {known.device} at {known.url}; `fedloop-edge leave` ends that"
            )

        def wait(seconds: float) -> None:
            typer.echo("waits for a person to approve this device: fedloop device approve", err=True)
            time.sleep(seconds)

        token_text = sys.stdin.readline() if token == "-" else token
        enrolled = identity.enrol(
            config.state_dir,
            url,
            token_text,
            name=name or config.name,
            serial_number=serial,
            proxy=config.proxy,
            wait=wait,
        )
    typer.echo(f"enrolled as {enrolled.device} at {enrolled.url}; start it: fedloop-edge run")


def run(
    context: typer.Context,
    relay: Annotated[
        str | None,
        typer.Option(help="Reach the coordinator through this relay, https://HOST:PORT; as the key relay."),
    ] = None,
) -> None:
    """Runs the daemon until it is stopped. Example: fedloop-edge --config edge.toml run"""
    from edge_client.daemon import main

    if relay is not None:
        context.obj[1].append(f"relay={relay}")
    config = configuration(context)
    with exclusive(config.state_dir):
        main.run(config)


def relay(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where devices reach it.")
    ] = "127.0.0.1:8444",
) -> None:
    """Runs a relay until it is stopped: it folds the updates of its devices, and passes the result on.

    It is enrolled as a device is, with a token of `fedloop device token --relay-name HOST`. Its devices enroll at its address,
    with a token of `fedloop device token --relay NAME`.

    Example: fedloop-edge --state-dir relay relay --listen 0.0.0.0:8444
    """
    from edge_client.relay import main

    config = configuration(context)
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UserError(f"--listen {listen!r}: expected HOST:PORT, such as 0.0.0.0:8444")
    with exclusive(config.state_dir):
        main.run(config, (host, int(port)))


def pause(context: typer.Context) -> None:
    """Accepts no work until `resume`; stops and gives back the current task. Example: fedloop-edge pause"""
    _set_paused(context, True)
    typer.echo("paused; `fedloop-edge resume` goes on")


def resume(context: typer.Context) -> None:
    """Accepts work again. Example: fedloop-edge resume"""
    _set_paused(context, False)
    typer.echo("resumed")


def leave(context: typer.Context, sure: Sure = False) -> None:
    """Ends this device's membership: notifies the coordinator, then removes key, certificate and files of runs.

    The ledger is kept. Example: fedloop-edge leave --yes
    """
    from edge_client.transport import identity

    config = configuration(context)
    with exclusive(config.state_dir):
        try:
            who = identity.load(config.state_dir)
        except UserError as damaged:
            typer.echo(f"{damaged}", err=True)
            confirm(sure, "Remove what is left of this device's identity?")
            where = "the coordinator, which was not notified"
        else:
            if who is None:
                raise UserError("this device is not enrolled")
            confirm(sure, f"Leave {who.url} and remove this device's key?")
            _notify_leaving(config, who)
            where = who.url
        _wipe_work(config)
        identity.wipe(config.state_dir)
    typer.echo(f"left {where}; the ledger is kept: fedloop-edge ledger")


def opt_out(
    context: typer.Context,
    run_name: Annotated[str, typer.Argument(metavar="RUN")],
    undo: Annotated[bool, typer.Option("--undo", help="Take part again.")] = False,
) -> None:
    """Opts out of a run from now on; discards its waiting results.

    RUN is the name or the id of a run. Example: fedloop-edge opt-out digits
    """
    config = configuration(context)
    with closing(State(config.state_dir)) as state:
        state.set_opted_out(run_name, not undo)
    wake(config)
    typer.echo(f"takes part in {run_name} again" if undo else f"takes no part in {run_name}")


def wipe(context: typer.Context, sure: Sure = False) -> None:
    """Removes all files of runs, waiting results and the client rules' states; identity and ledger stay.

    Example: fedloop-edge wipe --yes
    """
    config = configuration(context)
    with exclusive(config.state_dir):
        confirm(sure, "Remove all files of runs, including undelivered results?")
        _wipe_work(config)
    typer.echo("removed")


def install_service(
    context: typer.Context,
    user: Annotated[bool, typer.Option("--user", help="For this user.")] = False,
    system: Annotated[bool, typer.Option("--system", help="For the machine; needs root.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Print the unit, install nothing.")] = False,
) -> None:
    """Installs the daemon as a systemd service. Example: fedloop-edge install-service --user"""
    from edge_client.commands import systemd_unit

    if user == system:
        raise UserError("pass exactly one of --user and --system")
    scope: systemd_unit.Scope = "user" if user else "system"
    file, sets = context.obj
    text = systemd_unit.unit(scope, configuration(context), file or default_file(os.environ), sets)
    for variable in sorted(each for each in os.environ if each.startswith(PREFIX) and each != FILE_VARIABLE):
        typer.echo(
            f"note: {variable} is set here but not for the service; put it into its configuration file",
            err=True,
        )
    if only_print:
        typer.echo(text, nl=False)
        return
    path = systemd_unit.install(scope, text)
    flag = "--user " if user else ""
    typer.echo(f"{path} installed; start it: systemctl {flag}enable --now fedloop-edge")
    if system:
        typer.echo(
            "it runs as its own user: the data sets must be readable for it, by their mode or by "
            "SupplementaryGroups= in `systemctl edit fedloop-edge`"
        )


def _set_paused(context: typer.Context, paused: bool) -> None:
    config = configuration(context)
    with closing(State(config.state_dir)) as state:
        state.set_paused(paused)
    wake(config)


def _notify_leaving(config: EdgeConfig, who: Any) -> None:
    """Notifies the coordinator; without an answer the device leaves anyway."""
    from edge_client.transport.link import Link, pinned_context

    context = pinned_context(who.ca_pem, who.credentials)
    try:
        with closing(Link(config.relay or who.url, context, proxy=config.proxy)) as link:
            link.post("/leave", {})
    except (Unreachable, ServerRefused, CertificateExpired) as error:
        typer.echo(f"the coordinator was not notified: {error}", err=True)


def _wipe_work(config: EdgeConfig) -> None:
    from edge_client.daemon import main

    main.wipe(config)
