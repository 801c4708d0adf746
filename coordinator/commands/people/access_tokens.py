"""`fedloop access-token`: tokens for programs and other machines."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import quote

import typer
from rich.text import Text

from coordinator.commands.options import Json, Shown, command_group, remote_command
from coordinator.commands.output import format_time, make_table, print_json
from coordinator.operator.client import Coordinator, OperatorClient, connect
from edge_client.wire.strict import printable

app = command_group("Access tokens: credentials of a user for programs and other machines.")


@app.command(epilog="Example: fedloop access-token create dashboard --role viewer --days 30")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for.", show_default=False)],
    role: Annotated[
        Literal["viewer", "auditor", "operator", "data_scientist", "admin"] | None,
        typer.Option("--role", help="At most the owner's. Default: the owner's."),
    ] = None,
    days: Annotated[float, typer.Option("--days", help="Until it expires.", min=0.01, max=366)] = 90.0,
    user: Annotated[
        str | None, typer.Option("--user", help="Its owner, for admins. Default: yourself.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(
            "--project", help="The only project that it may be used for. Default: any.", metavar="NAME"
        ),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Create an access token and print it; it is shown only now. Programs give it as FEDLOOP_TOKEN."""
    body = {"name": name, "role": role, "days": days, "user": user, "project": project}
    made = connect(coordinator).post("/access-tokens", body)
    if as_json:
        print_json(made)
        return
    typer.echo(made["token"])
    until = format_time(made["expires_at"])
    typer.echo(
        f"token of {printable(made['user'])}, role {made['role']}, until {until}; id {made['id']}", err=True
    )


@remote_command(app, "list", example="fedloop access-token list")
def list_tokens(
    client: OperatorClient,
    user: Annotated[str | None, typer.Option("--user", help="Only of this user, for admins.")] = None,
) -> Shown:
    """List your access tokens; admins see everybody's. Their text was shown once and is not stored."""
    found = client.get("/access-tokens", user=user)
    table = make_table("id", "user", "name", "role", "until", "last used")
    for each in found:
        until = "revoked" if each["revoked_at"] else format_time(each["expires_at"])
        used = format_time(each["last_used_at"]) if each["last_used_at"] else "never"
        cells = (each["id"], each["user"], each["name"], each["role"], until, used)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return found, table if found else ["no access tokens; create one: fedloop access-token create"]


@remote_command(app, example="fedloop access-token revoke 0b9f2c1e-…")
def revoke(
    client: OperatorClient,
    token: Annotated[
        str,
        typer.Argument(
            metavar="TOKEN-ID", help="As `fedloop access-token list` shows it.", show_default=False
        ),
    ],
) -> Shown:
    """Revoke an access token, and those that it created, from the next request on."""
    revoked = client.post(f"/access-tokens/{quote(token, safe='')}/revoke")
    return revoked, [f"access token {printable(revoked['name'])} is revoked"]
