"""`fedloop-edge status`, `doctor`, `ledger` and the like: inspect the device. Only `ledger --wipe` changes anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.commands.cli_options import AsJson, Sure, configuration, confirm, load_config
from edge_client.errors import UserError

if TYPE_CHECKING:
    from edge_client.outbox import Entry, Ledger

_FULL_BYTES = 1_000_000


def status(context: typer.Context, as_json: AsJson = False) -> None:
    """Shows what the daemon is doing. Example: fedloop-edge status --json"""
    from edge_client.daemon import status as reader

    document = reader.read(configuration(context).state_dir)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    for line in _status_lines(document):
        typer.echo(line)


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Checks what keeps this device from working, and says how to fix it.

    Exit code 1 if a check fails. Example: fedloop-edge doctor
    """
    from edge_client.commands.doctor import examine

    checks = []
    for check in examine(configuration(context)):
        checks.append(check)
        if not as_json:
            typer.echo(f"{'ok  ' if check.well else 'FAIL'} {check.name}: {check.found}")
            if check.mend:
                typer.echo(f"     {check.mend}")
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    if not all(check.well for check in checks):
        raise typer.Exit(1)


def ledger(
    context: typer.Context,
    as_json: AsJson = False,
    show: Annotated[int | None, typer.Option(help="Entry whose payload to look at.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="What else the coordinator learns, key by key.")
    ] = False,
    wipe: Annotated[bool, typer.Option("--wipe", help="Forget all of it.")] = False,
    sure: Sure = False,
) -> None:
    """Shows everything that ever left this device. Example: fedloop-edge ledger --show 3"""
    from edge_client.daemon import main
    from edge_client.outbox import Ledger
    from edge_client.outbox import explain as explain_messages
    from edge_client.state import State

    config = configuration(context)
    with closing(State(config.state_dir)) as state:
        records = Ledger(state)
        if wipe:
            confirm(sure, "Forget everything this device has recorded about what left it?")
            records.wipe()
            typer.echo("the ledger is empty")
        elif explain:
            typer.echo(json.dumps(explain_messages(main.checkin_now(config, state)), indent=2))
        elif show is not None:
            _print_payload(records, records.entry(show), as_json)
        else:
            _print_entries(records.entries(), as_json)


def config_check(context: typer.Context, as_json: AsJson = False) -> None:
    """Prints the effective configuration and the origin of each value. Example: fedloop-edge --config edge.toml config check"""
    from edge_client import data as connectors

    loaded = load_config(context)
    problems = {name: connectors.problem_of(data) for name, data in loaded.config.data.items()}
    if any(problems.values()):
        raise UserError("\n".join(f"data.{name}: {words}" for name, words in problems.items() if words))
    origins = loaded.origins
    if as_json:
        document = {key: {"value": value, "origin": origin} for key, (value, origin) in origins.items()}
        typer.echo(json.dumps(document, indent=2, default=str))
        return
    width = max(len(key) for key in origins)
    for key, (value, origin) in origins.items():
        typer.echo(f"{key:<{width}}  {json.dumps(value, default=str)}  ({origin})")


def data_preview(
    context: typer.Context, name: Annotated[str | None, typer.Argument()] = None, as_json: AsJson = False
) -> None:
    """Shows schema and row count of a configured data set, as training reads it. Nothing leaves the device.

    NAME is what experiments call it; without a name all are read.
    Example: fedloop-edge data preview digits
    """
    from edge_client.data import preview

    config = configuration(context)
    tables = config.data
    if not tables:
        raise UserError(
            "no data set is configured; add a table [data.NAME] to the configuration (--config FILE): "
            '[data.digits] with kind = "csv", path = "digits.csv" and label = "digit", for example'
        )
    if name is not None and name not in tables:
        raise UserError(
            f"no data set {name!r} is configured; there are: {', '.join(sorted(tables)) or 'none'}"
        )
    memory = config.limits.memory_bytes
    views = {each: preview.preview(table, memory) for each, table in tables.items() if name in (None, each)}
    if as_json:
        typer.echo(json.dumps(views, indent=2))
    for each, view in views.items() if not as_json else ():
        typer.echo(f"{each}:")
        for key, value in view.items():
            typer.echo(f"  {key}: {_format_value(key, value)}")
    if any("problem" in view for view in views.values()):
        raise typer.Exit(2)


def _print_entries(entries: Sequence[Entry], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    if not entries:
        typer.echo("nothing has left this device; what a check-in reports: fedloop-edge ledger --explain")
    for entry in entries:
        when = datetime.fromtimestamp(entry.at).astimezone().isoformat(" ", "seconds")
        typer.echo(
            f"{entry.id:>5}  {when}  {entry.run_name}, round {entry.round}  {entry.kind}  {entry.size_bytes} bytes  "
            f"{entry.sha256[:12]}  {entry.treated}  {entry.outcome or 'not acknowledged'}"
        )


def _print_payload(ledger: Ledger, entry: Entry, as_json: bool) -> None:
    """One entry's payload: the sums of an evaluation, statistics, or each tensor's shape, norm and extremes of an update."""
    from edge_client.outbox import masked_bytes, summarize_tensors

    payload = ledger.payload(entry)
    document: dict[str, Any] = asdict(entry)
    if entry.kind in ("evaluation", "statistics"):
        document["sums"] = json.loads(payload)
    elif (size := masked_bytes(payload)) is not None:
        document["masked_bytes"] = size
    else:
        document["tensors"] = summarize_tensors(payload)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    _print_entries([entry], False)
    for key, value in document.get("sums", {}).items():
        typer.echo(f"  {key}: {value}")
    if "masked_bytes" in document:
        typer.echo(
            f"  {document['masked_bytes']} bytes that look random: nobody can read the update in them, neither here nor there"
        )
    for view in document.get("tensors", ()):
        typer.echo(
            f"  {view['name']}  {tuple(view['shape'])}  norm {view['norm']:.6g}  "
            f"from {view['smallest']:.6g} to {view['largest']:.6g}"
        )


def _format_value(key: str, value: Any) -> str:
    if key == "schema":
        return "; ".join(f"{name} ({kind})" for name, kind in value)
    return value if isinstance(value, str) else json.dumps(value)


def _status_lines(document: dict[str, Any]) -> Iterator[str]:
    if not document["enrolled"]:
        yield "not enrolled: fedloop-edge enroll URL TOKEN"
        return
    yield f"device {document['device']} ({document['name']}) of {document['coordinator']}"
    running = (
        f"running as process {document['pid']}" if document["running"] else "not running: fedloop-edge run"
    )
    yield running + (", paused: fedloop-edge resume" if document["paused"] else "")
    if "state" in document:
        yield f"{document['state']}: {document['words']}"
    if document["disk_free_bytes"] < _FULL_BYTES:
        yield "the disk of the state folder is full: free some space, and the daemon goes on by itself"
    if document["opted_out"]:
        yield f"takes no part in: {', '.join(document['opted_out'])}"
    if document["results_waiting"]:
        yield f"results waiting for delivery: {document['results_waiting']}"
    for model in document["models"]:
        yield _model_line(model)
    for note in document.get("notes", ()):
        yield f"- {note}"


def _model_line(model: dict[str, Any]) -> str:
    version, last = model["version"], model["last"]
    runs = "no version runs" if version is None else f"version {version} in slot {model['active']}"
    if model["on_trial"]:
        runs += ", on trial"
    others = [f"{held} in slot {name}" for name, held in model["slots"].items() if name != model["active"]]
    other = f", {others[0]}" if others else ""
    report = ""
    if last is not None:
        reason = f" ({last['code']}: {last['words']})" if last["code"] else ""
        report = f"; version {last['version']}: {last['standing']}{reason}"
    return f"model {model['model']}: {runs}{other}{report}"
