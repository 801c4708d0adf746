"""`fedloop login`, `logout` and `whoami`: the user's own access token for a coordinator."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from coordinator.commands.options import Json, Shown, remote_command
from coordinator.commands.output import format_time, print_json
from coordinator.commands.people.passwords import read_secret
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator, OperatorClient, Refused, coordinator_url
from coordinator.operator.credentials import VARIABLES, credentials_file, find_saved, save_token
from edge_client.wire.strict import printable


def add_login(app: typer.Typer) -> None:
    """Adds the three commands."""
    app.command(epilog="Example: fedloop login --coordinator https://fed.example.org --name anna")(login)
    app.command(epilog="Example: fedloop logout")(logout)
    remote_command(app, example="fedloop whoami")(whoami)


def login(
    name: Annotated[str | None, typer.Option("--name", help="User. Default: prompted for.")] = None,
    with_token: Annotated[
        bool,
        typer.Option("--with-token", help="Keep an access token from standard input, not a new one."),
    ] = False,
    oidc: Annotated[
        bool,
        typer.Option(
            "--oidc", help="Sign in at the coordinator's OpenID provider, in a browser on this machine."
        ),
    ] = False,
    redirect_port: Annotated[
        int,
        typer.Option(
            "--redirect-port",
            help="With --oidc: port of 127.0.0.1 that the browser comes back to. Default: any free one.",
            min=0,
            max=65535,
        ),
    ] = 0,
    days: Annotated[
        float, typer.Option("--days", help="Until the new token expires.", min=0.01, max=366)
    ] = 30.0,
    project: Annotated[
        str | None,
        typer.Option("--project", help="The only project that the new token is for. Default: all of yours."),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Sign in to a coordinator: keep an access token for it in a file that only you can read.

    The password comes from a prompt, or from standard input.
    """
    if with_token + oidc + (name is not None) > 1:
        raise UserError("--name, --with-token and --oidc are three ways to sign in: give one")
    url = coordinator_url(coordinator)
    if with_token:
        token = read_secret("Access token")
    else:
        session = OperatorClient(url, None)
        if oidc:
            _sign_in_in_browser(session, redirect_port)
        else:
            session.sign_in(name or typer.prompt("Name", err=True), read_secret("Password"))
        token = _exchange(session, days, project)
    who = OperatorClient(url, token, "standard input").get("/session")
    save_token(url, token)
    if as_json:
        print_json(who)
        return
    typer.echo(
        f"signed in to {url} as {printable(who['name'])} ({who['role']}); the token is in {credentials_file()}"
    )
    for variable in VARIABLES:
        if os.environ.get(variable, "").strip():
            typer.echo(f"note: {variable} is set, and commands use that token instead", err=True)
            break


def _sign_in_in_browser(session: OperatorClient, redirect_port: int) -> None:
    from coordinator.operator.browser_sign_in import can_open_browser, sign_in_in_browser

    def open_page(url: str) -> None:
        typer.echo(f"sign in with a browser on this machine: {url}", err=True)
        if can_open_browser():
            typer.launch(url)

    sign_in_in_browser(session, redirect_port, open_page)


def _exchange(session: OperatorClient, days: float, project: str | None) -> str:
    """A new access token for this machine, in place of the session."""
    body = {"name": f"fedloop login on {os.uname().nodename}"[:64], "days": days, "project": project}
    token: str = session.post("/access-tokens", body)["token"]
    session.delete("/session")
    return token


def logout(
    everywhere: Annotated[
        bool,
        typer.Option(
            "--everywhere", help="End all your sessions in browsers too, and revoke all your access tokens."
        ),
    ] = False,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Revoke the token that `fedloop login` left for a coordinator, and forget it."""
    url = coordinator_url(coordinator)
    token = find_saved(url)
    revoked = False
    if token is not None:
        client = OperatorClient(url, token)
        try:
            if everywhere:
                client.post("/session/end-all?access_tokens=true")
            else:
                identity = client.get("/session")["credential"]
                client.post(f"/access-tokens/{identity}/revoke")
            revoked = True
        except Refused as refused:
            if refused.status != 401:  # it has ended already
                raise
        save_token(url, None)
    where = f"{url} everywhere" if everywhere and revoked else url
    if as_json:
        print_json({"coordinator": url, "signed_in_before": token is not None, "revoked": revoked})
    else:
        typer.echo(f"signed out of {where}" if token is not None else f"not signed in to {url}")


def whoami(client: OperatorClient) -> Shown:
    """Show as whom commands act on a coordinator, and what they may do."""
    who = client.get("/session")
    return who, _lines(who)


def _lines(who: dict[str, Any]) -> list[str]:
    kinds = {
        "admin_token": "by the admin token",
        "access_token": "by an access token",
        "session": "by a session",
    }
    lines = [
        f"{printable(who['name'])} ({who['role']}), {kinds[who['kind']]}",
        f"in the project {who['project']}"
        if who["project"]
        else "in no project; name one: fedloop --project",
        f"may act as: {', '.join(who['grants'])}",
    ]
    if who["expires_at"]:
        lines.append(f"until {format_time(who['expires_at'])}")
    return lines
