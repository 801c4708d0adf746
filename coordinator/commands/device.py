"""`fedloop device`: enrol devices, inspect them, revoke them.

`coordinator.operator.client` says how a device or a run may be named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from coordinator.commands.options import Json, Shown, command_group, remote_command
from coordinator.commands.output import format_time, make_table, print_json
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator, OperatorClient, connect, device_id, run_id, token_id
from coordinator.short_ids import short_id
from edge_client.wire.relays import RELAY_PORT, URL_LABEL
from edge_client.wire.strict import printable

app = command_group("Devices: enrolment tokens, the list of devices, and why a device takes part or not.")

DeviceReference = Annotated[
    str,
    typer.Argument(metavar="DEVICE", help="Its id, the beginning of it, or its name.", show_default=False),
]
Group = Annotated[str, typer.Option("--group", help="Group that the devices belong to.")]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command(epilog="Example: fedloop device token --uses 20 --ttl 2h --group clinic")
def token(
    uses: Annotated[
        int | None,
        typer.Option(
            "--uses",
            min=1,
            max=1_000_000,
            help="Number of devices that it admits. Default: 1; with --listed, any.",
        ),
    ] = None,
    ttl: Annotated[str, typer.Option("--ttl", help="How long it is valid: 90s, 15m, 2h, 7d.")] = "15m",
    group: Group = "default",
    approve: Annotated[bool, typer.Option("--approve", help="A person approves each device.")] = False,
    listed: Annotated[
        bool,
        typer.Option("--listed", help="Admit only machines of `fedloop device import`, into their groups."),
    ] = False,
    relay: Annotated[
        str | None,
        typer.Option("--relay", metavar="RELAY", help="Relay that the devices belong to: its id or name."),
    ] = None,
    relay_names: Annotated[
        list[str] | None,
        typer.Option(
            "--relay-name",
            metavar="HOST",
            help="Admit a relay, which devices reach at this host name or address. May be repeated.",
        ),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Make an enrolment token and print what to type on the device."""
    request: dict[str, Any] = {
        "uses": uses,
        "ttl_seconds": _seconds(ttl),
        "group": group,
        "needs_approval": approve,
        "listed_serials_only": listed,
    }
    client = connect(coordinator)
    if relay is not None:
        request["relay"] = device_id(client, relay)
    if relay_names:
        request["relay_names"] = relay_names
    created = client.post("/tokens", request)
    if as_json:
        print_json(created)
        return
    what = "relay" if relay_names else "device"
    how_many = "any listed machine" if listed else f"{created['uses']} {what}{'s' * (created['uses'] != 1)}"
    url = created["url"] if relay is None else _relay_url(client.get(f"/devices/{request['relay']}"))
    typer.echo(f"fedloop-edge enroll {url} {created['token']}")
    typer.echo(f"valid for {how_many}, until {format_time(created['expires_at'])}", err=True)


@remote_command(app, "tokens", example="fedloop device tokens")
def list_tokens(client: OperatorClient) -> Shown:
    """List the tokens that still admit devices. Their secret was shown once and is not stored."""
    tokens = client.get("/tokens")
    return tokens, map(_token_line, tokens) if tokens else ["no tokens; make one: fedloop device token"]


@remote_command(app, example="fedloop device withdraw 0b9f2c1e")
def withdraw(
    client: OperatorClient,
    token: Annotated[
        str,
        typer.Argument(
            metavar="TOKEN-ID", help="As `fedloop device tokens` shows it; the beginning is enough."
        ),
    ],
) -> Shown:
    """Withdraw a token now; devices that enrolled with it stay."""
    withdrawn = client.post(f"/tokens/{quote(token_id(client, token), safe='')}/withdraw")
    return withdrawn, [f"token {short_id(withdrawn['id'])} admits no more devices"]


@remote_command(app, "import", example="fedloop device import serials.txt --group line-3")
def import_serials(
    client: OperatorClient,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Serial numbers, one a line; # begins a comment.")
    ],
    group: Group = "default",
) -> Shown:
    """List machines by serial number: each may enrol once, with a token made by `token --listed`."""
    added = client.post("/serials", {"serial_numbers": _serials(file), "group": group})
    return added, [f"{added['added']} listed in group {group}, {added['already_listed']} were listed already"]


@remote_command(app, "list", example="fedloop device list --state pending")
def list_devices(
    client: OperatorClient,
    state: Annotated[
        str | None, typer.Option("--state", help="Only devices that are pending, active, revoked or left.")
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="Only devices of this group.")] = None,
) -> Shown:
    """List the enrolled devices: online, late for their next check-in, or offline since it is a minute overdue."""
    devices = list(client.pages("/devices", "devices", state=state, group=group))
    none = ["no devices; make a token for one: fedloop device token"]
    return devices, _table(devices) if devices else none


@remote_command(app, example="fedloop device show gateway-7")
def show(client: OperatorClient, device: DeviceReference) -> Shown:
    """Show the record of a device."""
    path = f"/devices/{device_id(client, device)}"
    record, privacy = client.get(path), client.get(f"{path}/privacy")
    fields = {key: value for key, value in record.items() if key != "report"} | record["report"]
    lines = [f"{key.replace('_', ' '):18} {_format_value(key, value)}" for key, value in fields.items()]
    if privacy["runs"]:
        lines += _privacy_lines(privacy)
    return record | {"privacy": privacy}, lines


@remote_command(app, example="fedloop device approve 3f2a")
def approve(client: OperatorClient, device: DeviceReference) -> Shown:
    """Approve a pending device."""
    return _change(client, device, "approve", "may take part")


@remote_command(app, example="fedloop device revoke 3f2a")
def revoke(
    client: OperatorClient,
    device: DeviceReference,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; for the event and the audit log.")
    ] = "",
) -> Shown:
    """Revoke a device for good, from its next request on."""
    return _change(client, device, "revoke", "is revoked", {"reason": reason} if reason else None)


@remote_command(app, "group", example="fedloop device group gateway-7 clinic")
def change_group(
    client: OperatorClient,
    device: DeviceReference,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group that it belongs to from now on.")],
) -> Shown:
    """Put a device into another group; runs select it by that from their next round on, and later rollouts."""
    return _change(client, device, "group", f"is in group {printable(group)}", {"group": group})


@remote_command(app, example="fedloop device why gateway-7")
def why(
    client: OperatorClient,
    device: DeviceReference,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Only this run: its id, the beginning of it, or its name."),
    ] = None,
) -> Shown:
    """Explain why a device takes part in the runs, or does not."""
    only = run_id(client, run) if run is not None else None
    explanation = client.get(f"/devices/{device_id(client, device)}/why", run=only)
    return explanation, _explanation_lines(explanation)


def _change(
    client: OperatorClient, device: str, verb: str, outcome: str, body: dict[str, str] | None = None
) -> Shown:
    changed = client.post(f"/devices/{device_id(client, device)}/{verb}", body)
    return changed, [f"{printable(changed['name'])} ({short_id(changed['id'])}) {outcome}"]


def _relay_url(relay: Mapping[str, Any]) -> str:
    """Where devices reach a relay: as it reported, else the first of its names with the port that relays have by default."""
    reported = relay["report"].get("labels", {}).get(URL_LABEL)
    return reported or f"https://{relay['relay_names'][0]}:{RELAY_PORT}"


def _token_line(token: Mapping[str, Any]) -> str:
    who = "any listed machine" if token["listed_serials_only"] else f"group {printable(token['group'])}"
    who += f", relays at {', '.join(token['relay_names'])}" if token["relay_names"] else ""
    who += f", behind relay {short_id(token['relay'])}" if token["relay"] else ""
    uses = f"{token['uses_left']} more device{'s' * (token['uses_left'] != 1)}"
    ends = format_time(token["expires_at"])
    return (
        f"{short_id(token['id'])}  {who}, {uses}, until {ends}{', with approval' * token['needs_approval']}"
    )


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
        raise UserError(f"{file}: holds no serial number; expected one a line")
    for number in numbers:
        if len(number) > 200 or not number.isprintable():
            raise UserError(
                f"{file}: {number[:40]!r} is not a serial number: at most 200 printable characters"
            )
    return numbers


def _table(devices: list[dict[str, Any]]) -> Table:
    table = make_table("id", "name", "group", "state", "presence", "last seen", "runtimes")
    for each in devices:
        cells = (
            short_id(each["id"]),
            each["name"],
            each["group"],
            each["state"],
            each["presence"],
            format_time(each["last_seen_at"]) if each["last_seen_at"] else "never",
            ", ".join(each["report"].get("runtimes", ())),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _explanation_lines(explanation: Mapping[str, Any]) -> Iterator[str]:
    yield f"{printable(explanation['name'])} ({short_id(explanation['device'])}) is {explanation['state']}"
    for reason in explanation["reasons"]:
        yield f"  {printable(reason['words'])}"
    if not explanation["runs"]:
        yield "no runs to take part in"
    for run in explanation["runs"]:
        yield f"run {printable(run['name'])} ({short_id(run['run'])}, {run['state']})"
        for reason in run["reasons"]:
            yield f"  {printable(reason['words'])}"


def _privacy_lines(privacy: Mapping[str, Any]) -> Iterator[str]:
    """What the device has spent, in all runs and in each."""
    yield f"{'privacy':18} {privacy['in_words']}"
    for run in privacy["runs"]:
        rounds = f"{run['rounds']} round{'s' * (run['rounds'] != 1)}"
        yield f"  {printable(run['run_name'])} ({short_id(run['run'])}): epsilon {run['epsilon']:.4g}, delta {run['delta']:g}, {rounds}"


def _format_value(key: str, value: Any) -> str:
    if value is None or value in ({}, [], ""):
        return "-"
    if key.endswith(("_at", "_until")):
        return format_time(value)
    if isinstance(value, dict):
        return printable(", ".join(f"{name} {each}" for name, each in value.items()))
    if isinstance(value, list):
        return printable("; ".join(map(str, value)))
    return printable(str(value))
