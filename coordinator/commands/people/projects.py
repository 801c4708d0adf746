"""`fedloop project`: the tenants of a coordinator, and who is in them."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer
from rich.text import Text

from coordinator.commands.options import Shown, command_group, remote_command
from coordinator.commands.output import format_time, make_table
from coordinator.operator.client import OperatorClient
from edge_client.wire.strict import printable

app = command_group(
    "Projects: each has its own devices, runs, models and rollouts, which no other project sees."
)

Name = Annotated[str, typer.Argument(metavar="PROJECT", show_default=False)]
User = Annotated[str, typer.Argument(metavar="USER", show_default=False)]


@remote_command(app, example="fedloop project create clinic-a")
def create(client: OperatorClient, name: Name) -> Shown:
    """Create a project, without members. Admins and auditors of the coordinator are in every project."""
    made = client.post("/projects", {"name": name})
    return made, [f"project {printable(made['name'])} is created; add members: fedloop project add-member"]


@remote_command(app, "list", example="fedloop project list")
def list_projects(client: OperatorClient) -> Shown:
    """List your projects; admins and auditors see all."""
    found = client.get("/projects")
    table = make_table("name", "state", "created")
    for each in found:
        state = f"archived {format_time(each['archived_at'])}" if each["archived_at"] else "open"
        table.add_row(Text(printable(each["name"])), state, format_time(each["created_at"]))
    return found, table if found else ["you are in no project; an admin adds you: fedloop project add-member"]


@remote_command(app, example="fedloop project members clinic-a")
def members(client: OperatorClient, name: Name) -> Shown:
    """List the members of a project."""
    found = client.get(f"{_path(name)}/members")
    table = make_table("user", "role")
    for each in found:
        table.add_row(Text(printable(each["user"])), each["role"])
    return found, table if found else ["no members; add one: fedloop project add-member"]


@remote_command(app, "add-member", example="fedloop project add-member clinic-a anna --role operator")
def add_member(
    client: OperatorClient,
    name: Name,
    user: User,
    role: Annotated[
        Literal["viewer", "operator", "data_scientist"],
        typer.Option("--role", help="What the user may do in the project; docs/people.md lists it."),
    ] = "viewer",
) -> Shown:
    """Add a user to a project, or change their role in it, from the next request on."""
    member = client.put(f"{_path(name)}/members/{quote(user, safe='')}", {"role": role})
    return member, [f"user {printable(member['user'])} has the role {member['role']} in {printable(name)}"]


@remote_command(app, "remove-member", example="fedloop project remove-member clinic-a anna")
def remove_member(client: OperatorClient, name: Name, user: User) -> Shown:
    """Remove a user from a project, from the next request on."""
    client.delete(f"{_path(name)}/members/{quote(user, safe='')}")
    return {"removed": user}, [f"user {printable(user)} is no longer in {printable(name)}"]


@remote_command(app, example="fedloop project archive clinic-a")
def archive(
    client: OperatorClient,
    name: Name,
    undo: Annotated[bool, typer.Option("--undo", help="Open an archived project again.")] = False,
) -> Shown:
    """Make a project read-only, once its runs have ended. Nothing is deleted."""
    changed: dict[str, Any] = client.patch(_path(name), {"archived": not undo})
    return changed, [f"project {printable(name)} is {'open' if undo else 'archived'}"]


def _path(name: str) -> str:
    return f"/projects/{quote(name, safe='')}"
