"""`fedloop rollout`: bring a published release to the fleet.

The commands only call the coordinator and print. The coordinator decides phases, gates and orders to devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any
from urllib.parse import quote

import typer

from coordinator.commands.options import Shown, command_group, remote_command
from coordinator.commands.output import format_time
from coordinator.errors import UserError
from coordinator.operator.client import OperatorClient, device_id
from coordinator.releases.roles import parse_release
from coordinator.rollouts.gates import Gates
from coordinator.short_ids import distinct_ids, short_id
from edge_client.wire.strict import printable
from strategies.suggestions import suggest

app = command_group("Rollouts: bring a release to devices phase by phase, and roll it back if it proves bad.")

RolloutReference = Annotated[
    str,
    typer.Argument(
        metavar="ROLLOUT", help="Its id, the beginning of it, or its model: the newest.", show_default=False
    ),
]

_FILTERS = {"group": "groups", "class": "device_classes", "runtime": "runtimes", "id": "ids"}
_ENDED = ("rolled_back", "aborted", "finished")
_GATES = {each.name: each.type for each in fields(Gates)}


@remote_command(
    app, example="fedloop rollout start digits:4 --phases 10,100 --filter group=clinic --gate install=0.98"
)
def start(
    client: OperatorClient,
    release: Annotated[str, typer.Argument(metavar="MODEL:VERSION", help="A published release.")],
    phases: Annotated[
        str,
        typer.Option(
            "--phases", help="Increasing percentages of the devices; the first phase has at least one device."
        ),
    ] = "1,10,50,100",
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            help="Which devices: group=, class=, runtime=, id=, label.KEY=. Values of one kind are alternatives; labels must all match.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    gates: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help=f"What every phase must reach: {', '.join(_GATES)}; VALUE none disables one.",
            metavar="NAME=VALUE",
        ),
    ] = None,
) -> Shown:
    """Start a rollout. Its devices and their order are fixed at the start."""
    name = parse_release(release)
    request = {
        "model": name.model,
        "version": name.version,
        "phases": _phases(phases),
        "filter": _filter(client, filters or []),
        "gates": _gates(gates or []),
    }
    created = client.post("/rollouts", request)
    return created, [
        f"rollout {short_id(created['id'])} of {name}; see it: fedloop rollout show {short_id(created['id'])}"
    ]


@remote_command(app, "list", example="fedloop rollout list --model digits")
def list_rollouts(
    client: OperatorClient,
    model: Annotated[str | None, typer.Option("--model", help="Only rollouts of this model.")] = None,
) -> Shown:
    """List rollouts, newest first."""
    rollouts = client.get("/rollouts", model=model)
    none = ["no rollouts; start one: fedloop rollout start MODEL:VERSION"]
    return rollouts, map(_summary, rollouts) if rollouts else none


@remote_command(app, example="fedloop rollout show digits")
def show(client: OperatorClient, rollout: RolloutReference) -> Shown:
    """Show the progress of a rollout by phase, and why devices failed."""
    shown = client.get(f"/rollouts/{_id(client, rollout)}")
    return shown, _lines(shown)


@remote_command(app, example="fedloop rollout pause digits")
def pause(client: OperatorClient, rollout: RolloutReference) -> Shown:
    """Offer the release to no more devices; those that have started continue."""
    return _steer(client, rollout, "pause", {}, "is paused")


@remote_command(app, example="fedloop rollout resume digits")
def resume(client: OperatorClient, rollout: RolloutReference) -> Shown:
    """Resume a paused rollout."""
    return _steer(client, rollout, "resume", {}, "is resumed")


@remote_command(app, example="fedloop rollout abort digits")
def abort(
    client: OperatorClient,
    rollout: RolloutReference,
    keep: Annotated[
        bool, typer.Option("--keep", help="Devices that have the release keep it instead of rolling back.")
    ] = False,
) -> Shown:
    """End a rollout for good, even a finished one; devices that have the release roll back to the previous one."""
    return _steer(client, rollout, "abort", {"keep": keep}, "is aborted")


@remote_command(app, example="fedloop rollout force gateway-7 --rollout digits")
def force(
    client: OperatorClient,
    device: Annotated[
        str, typer.Argument(metavar="DEVICE", help="Its id, the beginning of it, or its name.")
    ],
    rollout: Annotated[
        str | None,
        typer.Option(
            "--rollout", help="Id, its beginning, or model. Default: the newest rollout.", metavar="ROLLOUT"
        ),
    ] = None,
) -> Shown:
    """Let a device that failed with the release try again."""
    which = _id(client, rollout)
    member = client.post(f"/rollouts/{which}/force", {"device": device_id(client, device)})
    return member, [f"device {short_id(member['device'])} tries again when its phase is open"]


def _steer(client: OperatorClient, rollout: str, verb: str, body: Mapping[str, Any], outcome: str) -> Shown:
    changed = client.post(f"/rollouts/{_id(client, rollout)}/{verb}", body)
    return changed, [
        f"rollout {short_id(changed['id'])} of {changed['model']}:{changed['version']} {outcome}"
    ]


def _id(client: OperatorClient, reference: str | None) -> str:
    """The id of the rollout that `reference` means, quoted for a path."""
    newest_first: list[dict[str, Any]] = client.get("/rollouts", limit=1000)
    of_model = [each for each in newest_first if reference is None or each["model"] == reference]
    matches = of_model[:1] or [
        each for each in newest_first if each["id"].startswith((reference or "").lower())
    ]
    if len(matches) == 1:
        return quote(matches[0]["id"], safe="")
    if not matches:
        raise UserError(
            f"no rollout matches {reference!r}; see them all: fedloop rollout list"
            if reference
            else "no rollouts"
        )
    some = ", ".join(distinct_ids([each["id"] for each in matches[:5]]))
    raise UserError(f"{reference!r} matches {len(matches)} rollouts: {some}; give more of the id")


def _phases(text: str) -> list[float]:
    try:
        return [_finite(each) for each in text.split(",")]
    except ValueError:
        raise UserError(
            f"--phases {text!r}: expected percentages separated by commas, such as 1,10,50,100"
        ) from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _filter(client: OperatorClient, texts: list[str]) -> dict[str, Any]:
    filters: dict[str, Any] = {"labels": {}}
    for text in texts:
        key, equals, value = text.partition("=")
        if equals and key.startswith("label.") and key != "label.":
            filters["labels"][key.removeprefix("label.")] = value
        elif equals and key in _FILTERS:
            known = device_id(client, value) if key == "id" else value
            filters.setdefault(_FILTERS[key], []).append(known)
        else:
            raise UserError(
                f"--filter {text!r}: expected KEY=VALUE with one of {', '.join(_FILTERS)} or label.KEY, such as group=clinic"
            )
    return filters


def _gates(texts: list[str]) -> dict[str, float | int | None]:
    gates: dict[str, float | int | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in _GATES or not equals:
            raise UserError(
                f"--gate {text!r}: expected NAME=VALUE with one of {', '.join(_GATES)}{suggest(name, _GATES)}"
            )
        gates[name] = _gate_value(text, str(_GATES[name]), value)
    return gates


def _gate_value(text: str, kind: str, value: str) -> float | int | None:
    if value == "none" and "None" in kind:
        return None
    try:
        return int(value) if kind == "int" else _finite(value)
    except ValueError:
        expected = "an integer" if kind == "int" else "a number"
        raise UserError(f"--gate {text!r}: expected {expected}{' or none' * ('None' in kind)}") from None


def _summary(rollout: Mapping[str, Any]) -> str:
    has_phase = rollout["phase"] >= 0 and rollout["state"] not in _ENDED
    phase = f", phase {rollout['phase'] + 1}" if has_phase else ""
    release = f"{rollout['model']}:{rollout['version']}"
    return f"{short_id(rollout['id'])}  {release:24} {rollout['state']}{phase}, since {format_time(rollout['since'])}"


def _lines(rollout: Mapping[str, Any]) -> Iterator[str]:
    yield f"rollout {short_id(rollout['id'])} of {rollout['model']}:{rollout['version']}"
    yield f"{rollout['state']} since {format_time(rollout['since'])}" + (
        f": {rollout['reason']}" if rollout["reason"] else ""
    )
    if rollout["outstanding"]:
        yield f"{rollout['outstanding']} devices have yet to roll back"
    if not rollout["is_signed"]:
        yield "no device gets it yet: the signed repository does not contain it; the coordinator's log says why"
    for each in rollout["waits"]:
        yield f"waits: {each}"
    if rollout["undecided"]:
        yield f"undecided: {rollout['undecided']}"
    for phase in rollout["phases"]:
        yield _phase_line(phase)
    for failure in rollout["failures"]:
        yield f"  {_reason(failure)}"
    for each in rollout["stays"]:
        yield f"still runs it: {_reason(each)}"


def _reason(failure: Mapping[str, Any]) -> str:
    devices = f"{failure['devices']} device{'s' * (failure['devices'] != 1)}"
    return (
        f"{failure['code']}: {devices}, such as {short_id(failure['device'])}: {printable(failure['words'])}"
    )


def _phase_line(phase: Mapping[str, Any]) -> str:
    counts = [
        f"{phase[key]} {key.replace('_', ' ')}"
        for key in ("waiting", "installing", "active", "failed", "rolled_back", "barred")
        if phase[key]
    ]
    figures = []
    if phase["golden_accuracy"] is not None:
        figures.append(f"golden accuracy {phase['golden_accuracy']:.4f}")
    if compared := phase["comparison"]:
        name, of = ("accuracy", "accuracy") if compared["accuracy"] is not None else ("loss", "mean_loss")
        figures.append(
            f"{name} {compared[of]:.4f}, champion {compared['champion_' + of]:.4f} over {compared['labels']:.0f} labels"
        )
    elif phase["active"]:
        figures.append("not compared with a champion")
    state = "passed" if phase["passed_at"] else "open" if phase["opened_at"] else "to come"
    details = "; ".join([", ".join(counts) or "no devices", *figures])
    return f"phase {phase['number'] + 1}, {phase['percent']:g} %, {state}: {details}"
