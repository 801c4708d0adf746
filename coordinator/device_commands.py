"""`fedloop device`: letting machines in, looking at them, shutting them out.

A device is named by its id, by the beginning of it, or by its name, where that is the only one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.command_options import Json
from coordinator.errors import UserError
from coordinator.operator_client import Coordinator, OperatorClient, connect

app = typer.Typer(
    help="Devices: tokens to enrol them, who is there, and why one takes part or not.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Which = Annotated[
    str,
    typer.Argument(metavar="DEVICE", help="Its id, the beginning of it, or its name.", show_default=False),
]
Group = Annotated[str, typer.Option("--group", help="Group that the devices belong to.")]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PAGE = 1000
_WIDE = 2000


@app.command(epilog="Example: fedloop device token --uses 20 --ttl 2h --group clinic")
def token(
    uses: Annotated[
        int | None,
        typer.Option(
            "--uses", min=1, max=1_000_000, help="Devices it admits. Default: 1; with --listed, any."
        ),
    ] = None,
    ttl: Annotated[str, typer.Option("--ttl", help="How long it is good: 90s, 15m, 2h, 7d.")] = "15m",
    group: Group = "default",
    approve: Annotated[bool, typer.Option("--approve", help="A person approves each device.")] = False,
    listed: Annotated[
        bool,
        typer.Option("--listed", help="Admits machines of `fedloop device import` only, into their groups."),
    ] = False,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Make an enrolment token and print what to type on the device."""
    wanted = {
        "uses": uses,
        "ttl_seconds": _seconds(ttl),
        "group": group,
        "needs_approval": approve,
        "listed_serials_only": listed,
    }
    made = connect(coordinator).post("/tokens", wanted)
    if as_json:
        _print_json(made)
        return
    how_many = (
        "any listed machine" if listed else "1 device" if made["uses"] == 1 else f"{made['uses']} devices"
    )
    typer.echo(f"fedloop-edge enroll {made['url']} {made['token']}")
    typer.echo(f"good for {how_many}, until {moment(made['expires_at'])}", err=True)


@app.command("tokens", epilog="Example: fedloop device tokens")
def list_tokens(coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the tokens that still admit devices; their text was told once and is not kept."""
    found = connect(coordinator).get("/tokens")
    if as_json:
        _print_json(found)
    elif not found:
        typer.echo("no tokens; make one: fedloop device token")
    for each in () if as_json else found:
        who = "any listed machine" if each["listed_serials_only"] else f"group {_plain(each['group'])}"
        uses = f"{each['uses_left']} more device{'s' * (each['uses_left'] != 1)}"
        ends = moment(each["expires_at"])
        typer.echo(f"{each['id']}  {who}, {uses}, until {ends}{', with approval' * each['needs_approval']}")


@app.command(epilog="Example: fedloop device withdraw 0b9f2c1e-…")
def withdraw(
    token: Annotated[str, typer.Argument(metavar="TOKEN-ID", help="As `fedloop device tokens` shows it.")],
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """End a token now; devices that enrolled with it stay."""
    ended = connect(coordinator).post(f"/tokens/{quote(token, safe='')}/withdraw")
    if as_json:
        _print_json(ended)
    else:
        typer.echo(f"token {ended['id']} admits nobody any more")


@app.command("import", epilog="Example: fedloop device import serials.txt --group line-3")
def import_serials(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Serial numbers, one a line; # begins a comment.")
    ],
    group: Group = "default",
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """List machines by serial number: each may enrol once, with a token made by `token --listed`."""
    numbers = _serials(file)
    added = connect(coordinator).post("/serials", {"serial_numbers": numbers, "group": group})
    if as_json:
        _print_json(added)
        return
    typer.echo(f"{added['added']} listed in group {group}, {added['already_listed']} were listed already")


@app.command("list", epilog="Example: fedloop device list --state pending")
def list_devices(
    state: Annotated[
        str | None, typer.Option("--state", help="Only those pending, active, revoked or left.")
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="Only those of this group.")] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """List the devices that enrolled."""
    client = connect(coordinator)
    found = list(_all(client, state=state, group=group))
    if as_json:
        _print_json(found)
    elif not found:
        typer.echo("no devices; make a token for one: fedloop device token")
    else:
        # Cut to a terminal's width; what another program reads is whole.
        console = Console(width=None if sys.stdout.isatty() else _WIDE)
        console.print(_table(found))


@app.command(epilog="Example: fedloop device show gateway-7")
def show(device: Which, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show what is known of a device."""
    client = connect(coordinator)
    found = client.get(f"/devices/{device_id(client, device)}")
    if as_json:
        _print_json(found)
        return
    report = found.pop("report")
    for key, value in {**found, **report}.items():
        typer.echo(f"{key.replace('_', ' '):18} {_shown(key, value)}")


@app.command(epilog="Example: fedloop device approve 3f2a")
def approve(device: Which, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Let a pending device in."""
    _change(coordinator, device, "approve", "may take part", as_json)


@app.command(epilog="Example: fedloop device revoke 3f2a")
def revoke(device: Which, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Shut a device out for good, from its next request on."""
    _change(coordinator, device, "revoke", "is shut out", as_json)


@app.command(epilog="Example: fedloop device why gateway-7")
def why(
    device: Which,
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Only this run.")] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Say in words why a device takes part in the runs, or does not."""
    client = connect(coordinator)
    told = client.get(f"/devices/{device_id(client, device)}/why", run=run)
    if as_json:
        _print_json(told)
        return
    for line in _why_lines(told):
        typer.echo(line)


def _change(coordinator: str | None, device: str, verb: str, words: str, as_json: bool) -> None:
    client = connect(coordinator)
    changed = client.post(f"/devices/{device_id(client, device)}/{verb}")
    if as_json:
        _print_json(changed)
    else:
        typer.echo(f"{_plain(changed['name'])} ({changed['id']}) {words}")


def device_id(client: OperatorClient, called: str) -> str:
    """The id of the one device called so; a whole id wins, then a name, then the beginning of an id."""
    found = client.get("/devices", called=called, limit=100)["devices"]
    for fits in (
        [each for each in found if each["id"] == called.lower()],
        [each for each in found if each["name"] == called],
        found,
    ):
        if len(fits) == 1:
            return str(fits[0]["id"])
        if fits:
            some = ", ".join(f"{_plain(each['name'])} ({each['id'][:8]}…)" for each in fits[:5])
            raise UserError(f"{called!r} may be any of {len(fits)} devices: {some}; give more of the id")
    raise UserError(f"no device is called {called!r}; see them all: fedloop device list")


def _all(client: OperatorClient, **filters: str | None) -> Iterator[dict[str, Any]]:
    after: str | None = None
    while True:
        page = client.get("/devices", limit=_PAGE, after=after, **filters)
        yield from page["devices"]
        after = page["next"]
        if after is None:
            return


def _seconds(text: str) -> float:
    parsed = _DURATION.fullmatch(text.strip())
    if parsed is None:
        raise UserError(f"--ttl {text!r}: expected a number and a unit, such as 90s, 15m, 2h or 7d")
    return float(parsed[1]) * _UNIT_SECONDS[parsed[2]]


def _serials(file: Path) -> list[str]:
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not text in UTF-8") from None
    numbers = [number for line in lines if (number := line.partition("#")[0].strip())]
    if not numbers:
        raise UserError(f"{file}: no serial number in it; expected one a line")
    for number in numbers:
        if len(number) > 200 or not number.isprintable():
            raise UserError(f"{file}: {number[:40]!r} is no serial number: at most 200 printable characters")
    return numbers


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("id", "name", "group", "state", "last seen", "runtimes"):
        table.add_column(heading, no_wrap=True)
    for each in found:
        cells = (
            each["id"][:8],
            each["name"],
            each["group"],
            each["state"],
            moment(each["last_seen_at"]) if each["last_seen_at"] else "never",
            ", ".join(each["report"].get("runtimes", ())),
        )
        table.add_row(*(Text(_plain(cell)) for cell in cells))
    return table


def _why_lines(told: Mapping[str, Any]) -> Iterator[str]:
    yield f"{_plain(told['name'])} ({told['device']}) is {told['state']}"
    for reason in told["reasons"]:
        yield f"  {_plain(reason['words'])}"
    if not told["runs"]:
        yield "no runs to take part in"
    for run in told["runs"]:
        yield f"run {_plain(run['name'])} ({run['run'][:8]}, {run['state']})"
        for reason in run["reasons"]:
            yield f"  {_plain(reason['words'])}"


def _shown(key: str, value: Any) -> str:
    if value is None or value in ({}, [], ""):
        return "-"
    if key.endswith(("_at", "_until")):
        return moment(value)
    if isinstance(value, dict):
        return _plain(", ".join(f"{name} {each}" for name, each in value.items()))
    if isinstance(value, list):
        return _plain("; ".join(map(str, value)))
    return _plain(str(value))


def moment(text: str) -> str:
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _plain(text: str) -> str:
    """What a device said of itself, without anything that a terminal would obey."""
    return "".join(each if each.isprintable() else "�" for each in text)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
