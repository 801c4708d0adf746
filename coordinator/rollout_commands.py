"""`fedloop rollout`: a published release on its way through the fleet.

The command talks to the coordinator and prints; who is in which phase, what a gate says and who is told what are
the coordinator's.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any
from urllib.parse import quote

import typer

from coordinator.command_options import Json
from coordinator.device_commands import device_id, moment
from coordinator.errors import UserError
from coordinator.operator_client import Coordinator, OperatorClient, connect
from coordinator.releases.roles import release_named
from coordinator.rollouts.gates import Gates
from edge_client.wire.strict import printable

app = typer.Typer(
    help="Rollouts: bring a release to devices phase by phase, and back where it proves bad.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Which = Annotated[
    str,
    typer.Argument(
        metavar="ROLLOUT", help="Its id, the beginning of it, or its model: the newest.", show_default=False
    ),
]

_FILTERS = {"group": "groups", "class": "device_classes", "runtime": "runtimes", "id": "ids"}
_ENDED = ("rolled_back", "aborted", "finished")
_GATES = {each.name: each.type for each in fields(Gates)}


@app.command(
    epilog="Example: fedloop rollout start digits:4 --phases 10,100 --filter group=clinic --gate install=0.98"
)
def start(
    release: Annotated[str, typer.Argument(metavar="MODEL:VERSION", help="A published release.")],
    phases: Annotated[
        str,
        typer.Option(
            "--phases", help="Growing percentages of the devices; at least one device in the first."
        ),
    ] = "1,10,50,100",
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            help="Which devices: group=, class=, runtime=, id=, label.KEY=. Of one kind any fits, all labels must.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    gates: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help=f"What every phase must show: {', '.join(_GATES)}; VALUE none leaves one out.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Start a rollout. Its devices and their order are fixed now."""
    named = release_named(release)
    asked = {
        "model": named.model,
        "version": named.version,
        "phases": _phases(phases),
        "filter": _filter(filters or []),
        "gates": _gates(gates or []),
    }
    made = connect(coordinator).post("/rollouts", asked)
    if as_json:
        _print_json(made)
    else:
        typer.echo(f"rollout {made['id']} of {named}; see it: fedloop rollout show {made['id'][:8]}")


@app.command("list", epilog="Example: fedloop rollout list --model digits")
def list_rollouts(
    model: Annotated[str | None, typer.Option("--model", help="Only those of this model.")] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """List rollouts, the newest first."""
    found = connect(coordinator).get("/rollouts", model=model)
    if as_json:
        _print_json(found)
    elif not found:
        typer.echo("no rollouts; start one: fedloop rollout start MODEL:VERSION")
    for each in () if as_json else found:
        phase = f", phase {each['phase'] + 1}" if each["phase"] >= 0 and each["state"] not in _ENDED else ""
        release = f"{each['model']}:{each['version']}"
        typer.echo(f"{each['id'][:8]}  {release:24} {each['state']}{phase}, since {moment(each['since'])}")


@app.command(epilog="Example: fedloop rollout show digits")
def show(rollout: Which, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show how far a rollout is, phase by phase, and why devices failed."""
    client = connect(coordinator)
    found = client.get(f"/rollouts/{_id(client, rollout)}")
    if as_json:
        _print_json(found)
        return
    for line in _lines(found):
        typer.echo(line)


@app.command(epilog="Example: fedloop rollout pause digits")
def pause(rollout: Which, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Let no more devices hear of it; those that did go on."""
    _steer(coordinator, rollout, "pause", {}, "is paused", as_json)


@app.command(epilog="Example: fedloop rollout resume digits")
def resume(rollout: Which, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Go on with a paused rollout."""
    _steer(coordinator, rollout, "resume", {}, "goes on", as_json)


@app.command(epilog="Example: fedloop rollout abort digits")
def abort(
    rollout: Which,
    keep: Annotated[
        bool, typer.Option("--keep", help="Devices that have the release keep it, instead of going back.")
    ] = False,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """End a rollout for good, a finished one too; devices that have the release go back to what they had."""
    _steer(coordinator, rollout, "abort", {"keep": keep}, "is aborted", as_json)


@app.command(epilog="Example: fedloop rollout force gateway-7 --rollout digits")
def force(
    device: Annotated[
        str, typer.Argument(metavar="DEVICE", help="Its id, the beginning of it, or its name.")
    ],
    rollout: Annotated[
        str | None,
        typer.Option(
            "--rollout", help="Id, its beginning, or model. Default: the newest rollout.", metavar="ROLLOUT"
        ),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Let a device that failed with the release try it once more."""
    client = connect(coordinator)
    which = _id(client, rollout)
    member = client.post(f"/rollouts/{which}/force", {"device": device_id(client, device)})
    if as_json:
        _print_json(member)
    else:
        typer.echo(f"device {member['device']} tries once more when its phase is open")


def _steer(
    coordinator: str | None, rollout: str, verb: str, body: Mapping[str, Any], words: str, as_json: bool
) -> None:
    client = connect(coordinator)
    changed = client.post(f"/rollouts/{_id(client, rollout)}/{verb}", body)
    if as_json:
        _print_json(changed)
    else:
        typer.echo(f"rollout {changed['id']} of {changed['model']}:{changed['version']} {words}")


def _id(client: OperatorClient, called: str | None) -> str:
    """The id of the rollout called so, in a path."""
    known: list[dict[str, Any]] = client.get("/rollouts", limit=1000)  # the newest first
    of_model = [each for each in known if called is None or each["model"] == called]
    found = of_model[:1] or [each for each in known if each["id"].startswith((called or "").lower())]
    if len(found) == 1:
        return quote(found[0]["id"], safe="")
    if not found:
        raise UserError(
            f"no rollout is called {called!r}; see them all: fedloop rollout list"
            if called
            else "no rollouts"
        )
    some = ", ".join(each["id"][:13] for each in found[:5])
    raise UserError(f"{called!r} may be any of {len(found)} rollouts: {some}; give more of the id")


def _phases(text: str) -> list[float]:
    try:
        return [_finite(each) for each in text.split(",")]
    except ValueError:
        raise UserError(
            f"--phases {text!r}: expected percentages with commas between, such as 1,10,50,100"
        ) from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _filter(given: list[str]) -> dict[str, Any]:
    wanted: dict[str, Any] = {"labels": {}}
    for text in given:
        key, equals, value = text.partition("=")
        if equals and key.startswith("label.") and key != "label.":
            wanted["labels"][key.removeprefix("label.")] = value
        elif equals and key in _FILTERS:
            wanted.setdefault(_FILTERS[key], []).append(value)
        else:
            raise UserError(
                f"--filter {text!r}: expected KEY=VALUE with one of {', '.join(_FILTERS)} or label.KEY, such as group=clinic"
            )
    return wanted


def _gates(given: list[str]) -> dict[str, float | int | None]:
    wanted: dict[str, float | int | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in _GATES or not equals:
            near = difflib.get_close_matches(name, _GATES, 1)
            hint = f"; do you mean {near[0]}?" if near else ""
            raise UserError(f"--gate {text!r}: expected NAME=VALUE with one of {', '.join(_GATES)}{hint}")
        wanted[name] = _gate_value(text, str(_GATES[name]), value)
    return wanted


def _gate_value(text: str, kind: str, value: str) -> float | int | None:
    if value == "none" and "None" in kind:
        return None
    try:
        return int(value) if kind == "int" else _finite(value)
    except ValueError:
        what = "a whole number" if kind == "int" else "a number"
        raise UserError(f"--gate {text!r}: expected {what}{' or none' * ('None' in kind)}") from None


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"rollout {found['id']} of {found['model']}:{found['version']}"
    yield f"{found['state']} since {moment(found['since'])}" + (
        f": {found['reason']}" if found["reason"] else ""
    )
    if found["outstanding"]:
        yield f"{found['outstanding']} devices have yet to go back to what they had"
    if not found["is_signed"]:
        yield "nobody is told anything yet: the signed repository does not say it; the coordinator's log says why"
    for each in found["waits"]:
        yield f"waits: {each}"
    for phase in found["phases"]:
        yield _phase_line(phase)
    for failure in found["failures"]:
        devices = f"{failure['devices']} device{'s' * (failure['devices'] != 1)}"
        yield f"  {failure['code']}: {devices}, such as {failure['device']}: {printable(failure['words'])}"


def _phase_line(phase: Mapping[str, Any]) -> str:
    stands = [
        f"{phase[key]} {key.replace('_', ' ')}"
        for key in ("waiting", "installing", "active", "failed", "rolled_back", "barred")
        if phase[key]
    ]
    figures = []
    if phase["golden_accuracy"] is not None:
        figures.append(f"golden accuracy {phase['golden_accuracy']:.4f}")
    if compared := phase["comparison"]:
        figures.append(
            f"accuracy {compared['accuracy']:.4f}, champion {compared['champion_accuracy']:.4f} "
            f"over {compared['labels']:.0f} labels"
        )
    elif phase["active"]:
        figures.append("not compared with a champion")
    state = "passed" if phase["passed_at"] else "open" if phase["opened_at"] else "to come"
    told = "; ".join([", ".join(stands) or "no devices", *figures])
    return f"phase {phase['number'] + 1}, {phase['percent']:g} %, {state}: {told}"


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
