"""`fedloop user`: accounts of a coordinator."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote, urlsplit

import typer
from rich.text import Text

from coordinator.commands.options import Shown, command_group, remote_command
from coordinator.commands.output import format_time, make_table
from coordinator.commands.people.passwords import read_secret
from coordinator.errors import UserError
from coordinator.identity.principals import Role
from coordinator.operator.client import OperatorClient
from edge_client.wire.strict import printable

app = command_group(
    "Users: accounts, their roles and passwords. Passwords come from a prompt or standard input."
)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
RoleName = Annotated[
    Literal["viewer", "auditor", "operator", "data_scientist", "admin"],
    typer.Argument(metavar="ROLE", help=", ".join(get_args(Role)), show_default=False),
]


@remote_command(app, example="fedloop user add anna --role operator")
def add(
    client: OperatorClient,
    name: Name,
    role: Annotated[
        Literal["viewer", "auditor", "operator", "data_scientist", "admin"],
        typer.Option("--role", help="What the user may do; docs/people.md lists it."),
    ] = "viewer",
) -> Shown:
    """Create an account."""
    body = {"name": name, "role": role, "password": read_secret("Password", confirm=True)}
    made = client.post("/users", body)
    return made, [f"user {printable(made['name'])} has the role {made['role']}"]


@remote_command(app, "list", example="fedloop user list")
def list_users(client: OperatorClient) -> Shown:
    """List all accounts, disabled ones too."""
    found = client.get("/users")
    table = make_table("name", "role", "state", "created")
    for each in found:
        state = "disabled" if each["disabled"] else "enabled"
        cells = (each["name"], each["role"] or "in other projects", state, format_time(each["created_at"]))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return found, table if found else ["no users; add one: fedloop user add"]


@remote_command(app, example="fedloop user role anna data_scientist")
def role(client: OperatorClient, name: Name, role: RoleName) -> Shown:
    """Change a user's role, from the next request on."""
    changed = _change(client, name, {"role": role})
    return changed, [f"user {printable(changed['name'])} has the role {changed['role']}"]


@remote_command(app, example="fedloop user disable anna")
def disable(client: OperatorClient, name: Name) -> Shown:
    """Refuse a user everywhere, from the next request on; sessions end, access tokens rest."""
    changed = _change(client, name, {"disabled": True})
    return changed, [f"user {printable(changed['name'])} is disabled"]


@remote_command(app, example="fedloop user enable anna")
def enable(client: OperatorClient, name: Name) -> Shown:
    """Let a disabled user in again."""
    changed = _change(client, name, {"disabled": False})
    return changed, [f"user {printable(changed['name'])} is enabled"]


@remote_command(app, example="fedloop user password anna")
def password(
    client: OperatorClient,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Another user, for admins. Default: yourself.", show_default=False
        ),
    ] = None,
) -> Shown:
    """Change a password; sessions end. On standard input: the current one in a line of its own, if it is yours, and the new one."""
    if name is None:
        current = read_secret("Current password")
        body = {"current_password": current, "new_password": read_secret("New password", confirm=True)}
        client.put("/session/password", body)
    else:
        new = {"password": read_secret("New password", confirm=True)}
        client.put(f"/users/{quote(name, safe='')}/password", new)
    return {"changed": name}, ["the password is changed"]


@app.command(
    epilog="Example: fedloop user setup (on the coordinator's machine, with the link that serve printed)"
)
def setup(
    name: Annotated[str, typer.Option("--name", help="Name of the first user, an admin.")],
) -> None:
    """Create the first account with the one-time link of `fedloop serve`. On standard input: the link, then the password."""
    parts = urlsplit(read_secret("Link"))
    secret = parts.fragment.removeprefix("setup=")
    if parts.scheme not in ("http", "https") or not parts.netloc or secret == parts.fragment:
        raise UserError("not a link of `fedloop serve`; expected one such as http://127.0.0.1:8080/#setup=…")
    client = OperatorClient(f"{parts.scheme}://{parts.netloc}", None)
    client.set_up(secret, name, read_secret("Password", confirm=True))
    client.delete("/session")
    typer.echo(f"user {printable(name)} has the role admin; sign in: fedloop login --name {printable(name)}")


def _change(client: OperatorClient, name: str, change: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = client.patch(f"/users/{quote(name, safe='')}", change)
    return changed
