"""`fedloop serving deploy|undeploy|status|scale`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from coordinator.commands.options import Json, command_group
from coordinator.commands.output import format_bytes, make_table, print_json, print_output, print_summary
from coordinator.commands.serving.calls import Home, call
from coordinator.errors import UserError
from coordinator.model_references import is_version
from edge_client.wire.strict import printable

app = command_group("Serve models to programs: predictions over REST and gRPC, batched and in time.")

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Name of the deployment, which programs call it by.", show_default=False
    ),
]


SloMs = Annotated[
    float, typer.Option("--slo-ms", help="Time limit of a request that names none, in milliseconds.")
]
Least = Annotated[int, typer.Option("--min", help="Workers that stay without traffic.")]
Most = Annotated[
    int | None,
    typer.Option("--max", help="Workers under load. Default: as --min, at least 1.", show_default=False),
]
Threads = Annotated[int, typer.Option("--threads", help="Threads of one worker.")]
MaxBatch = Annotated[int, typer.Option("--max-batch", help="Rows that are computed together, at most.")]
BackendName = Annotated[
    str,
    typer.Option("--backend", help="auto, litert, torch, channels_last, compiled, onnx, packed or keras."),
]
ShadowModel = Annotated[
    str,
    typer.Option(
        "--shadow",
        help="A second version that gets the same rows; its answers are compared and not returned.",
        metavar="MODEL",
        show_default=False,
    ),
]
CanaryShare = Annotated[
    str,
    typer.Option(
        "--canary",
        help="A second version that answers a share of the requests, such as digits@candidate=0.1.",
        metavar="MODEL=SHARE",
        show_default=False,
    ),
]


@app.command(epilog="Example: fedloop serving deploy digits digits@champion --slo-ms 50 --max 4")
def deploy(
    name: Name,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A version of the registry, such as digits@champion, or the folder of a run, a pretraining, a compression or a "
            "release.",
            show_default=False,
        ),
    ],
    slo_ms: SloMs = 1000.0,
    least: Least = 1,
    most: Most = None,
    threads: Threads = 1,
    max_batch: MaxBatch = 64,
    backend: BackendName = "auto",
    shadow: ShadowModel = "",
    canary: CanaryShare = "",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Add or replace a deployment, once its model has been opened and its answers checked."""
    body: dict[str, Any] = {
        "model": _absolute(model),
        "slo_ms": slo_ms,
        "workers": {"min": least, "max": max(least, 1) if most is None else most, "threads": threads},
        "max_batch": max_batch,
        "backend": backend,
        "shadow": _absolute(shadow) if shadow else "",
    }
    if canary:
        body["canary"] = _parse_canary(canary)
    status = call(home, "PUT", f"deployments/{quote(name, safe='')}", body)
    print_summary(status, _sentence(status), as_json=as_json)


@app.command(epilog="Example: fedloop serving undeploy digits")
def undeploy(name: Name, home: Home = None) -> None:
    """Remove a deployment after it has answered what it has."""
    call(home, "DELETE", f"deployments/{quote(name, safe='')}")
    typer.echo(f"{name} is no longer deployed")


@app.command(epilog="Example: fedloop serving scale digits --min 0 --max 8")
def scale(
    name: Name,
    least: Annotated[
        int | None, typer.Option("--min", help="Workers that stay without traffic.", show_default=False)
    ] = None,
    most: Annotated[int | None, typer.Option("--max", help="Workers under load.", show_default=False)] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Change how many workers a deployment has."""
    if least is None and most is None:
        raise UserError("nothing to change: give --min, --max or both")
    given = {key: value for key, value in (("min", least), ("max", most)) if value is not None}
    status = call(home, "POST", f"deployments/{quote(name, safe='')}/scale", given)
    print_summary(status, _sentence(status), as_json=as_json)


@app.command(epilog="Example: fedloop serving status --json")
def status(home: Home = None, as_json: Json = False) -> None:
    """Show every deployment: its version, workers, memory and what it has answered."""
    found = call(home, "GET", "deployments")
    if as_json:
        print_json(found)
        return
    listed = found["deployments"]
    if not listed:
        typer.echo("nothing is deployed; add a model: fedloop serving deploy NAME MODEL")
        return
    print_output(_table(listed))
    if memory := found.get("memory"):
        used, limit = format_bytes(memory["used_bytes"]), format_bytes(memory["limit_bytes"])
        typer.echo(f"all workers take {used} of {limit} (--memory)")
    for each in listed:
        for kind in ("shadow", "canary"):
            if kind in each:
                typer.echo(f"{each['name']}: {_companion(kind, each[kind])}")
        if each["reason"]:
            typer.echo(f"{each['name']}: {printable(each['reason'], 500)}")


def _parse_canary(text: str) -> dict[str, Any]:
    model, _, share = text.rpartition("=")
    with suppress(ValueError):
        if model:
            return {"model": _absolute(model), "share": float(share)}
    raise UserError(f"--canary {text!r}: expected MODEL=SHARE, such as digits@candidate=0.1")


def _absolute(model: str) -> str:
    """A version as it is; a folder from the root, because the server may run elsewhere."""
    return model if is_version(model) else str(Path(model).absolute())


def _sentence(status: Mapping[str, Any]) -> str:
    return (
        f"{status['name']} serves {status['model']}, version {status['version']}, with {status['workers']} "
        f"worker{'s' * (status['workers'] != 1)} ({status['backend']})"
    )


def _companion(kind: str, found: Mapping[str, Any]) -> str:
    if not found["ready"]:
        return f"{kind} {printable(found['model'])} is not ready: {printable(found['reason'], 300)}"
    text = f"{kind} {printable(found['model'])}, version {found['version']}: {found['requests']:g} requests"
    if "agreement" in found:
        text += f", same class for {100 * found['agreement']:.2f} % of {found['rows']:g} rows"
    if found["failed"]:
        text += f", {found['failed']:g} failed"
    return text


def _table(listed: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table(
        "deployment", "model", "version", "backend", "workers", "memory", "requests", "failed", "waiting"
    )
    for each in listed:
        ready = each["ready"]
        table.add_row(
            Text(each["name"]),
            Text(printable(each["model"])),
            each["version"] if ready else "not ready",
            each["backend"] if ready else "",
            f"{each['workers']} of {each['max_workers']}" if ready else "",
            format_bytes(each["memory_bytes"]) if ready else "",
            str(each["requests"]) if ready else "",
            str(each["failed"]) if ready else "",
            str(each["waiting_rows"]) if ready else "",
        )
    return table
