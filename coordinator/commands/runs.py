"""`fedloop runs`: the runs in folders and at a coordinator, by path, name or the beginning of an id.

`coordinator.operator.run_references` says what RUN may be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from coordinator.commands.options import DataDir, Json, Mlflow, Sets, TensorBoard, command_group
from coordinator.commands.output import (
    RichProgress,
    format_event,
    format_metric,
    format_time,
    make_table,
    print_json,
    print_lines,
    print_output,
)
from coordinator.commands.summaries import run_summary, show_report
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator
from coordinator.operator.run_references import FOLDER, LocalRun, RemoteRun, find_run, reach
from coordinator.short_ids import short_id
from edge_client.wire.strict import printable

if TYPE_CHECKING:
    from coordinator.reports.trackers import Trackers

app = command_group("Runs: in folders and at a coordinator; what they did, and how to go on with them.")

_LIVE = ("queued", "running")

RunReference = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A folder, the name of one in runs/, or the id or name of a run at the coordinator; the beginning is enough.",
        show_default=False,
    ),
]


@app.command("list", epilog="Example: fedloop runs list --folder experiments")
def list_runs(
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Folder that holds folders of runs. Default: runs", metavar="DIR"),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """List the runs in folders, and those at the coordinator if one is named or runs on this machine; newest first."""
    from coordinator.reports import run_folders

    if folder is not None and not folder.is_dir():
        raise UserError(f"--folder {folder}: there is no such folder")
    rows = [LocalRun(run).row() for run in run_folders.list_runs(folder or FOLDER)]
    client = reach(coordinator)
    if client is not None:
        rows += [RemoteRun(client, shown).row() for shown in client.get("/runs", limit=1000)]
    rows.sort(key=lambda row: row["started_at"] or "", reverse=True)
    if as_json:
        print_json(rows)
    elif rows:
        print_output(_table(rows))
    else:
        typer.echo(f"no runs in {folder or FOLDER}/; start one: fedloop simulate")


@app.command(epilog="Example: fedloop runs show digits-20260105")
def show(run: RunReference, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show a run: its result so far, its notices and, while it is in progress on devices, what each device does in it."""
    found = find_run(run, coordinator)
    report, row = found.report(), found.row()
    devices = None
    if isinstance(found, RemoteRun) and row["state"] in _LIVE:
        devices = list(found.client.pages(f"/runs/{row['id']}/devices", "devices"))
    if as_json:
        print_json({**row, "report": report, **({"devices": devices} if devices is not None else {})})
    else:
        print_lines(_show_lines(found, row, report, devices))


@app.command(epilog="Example: fedloop runs logs 3f2a --follow")
def logs(
    run: RunReference,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for further events, until the run ends.")
    ] = False,
    coordinator: Coordinator = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON.")] = False,
) -> None:
    """Print the events of a run, oldest first."""
    from coordinator.operator import run_follower

    found = find_run(run, coordinator)
    if follow and isinstance(found, LocalRun):
        raise UserError(
            f"--follow is for runs at a coordinator; of a folder: tail -f {found.run.folder}/events.jsonl"
        )
    events = found.events()
    if follow and isinstance(found, RemoteRun):
        events = run_follower.events_until_end(found.client, found.shown["id"])
    for event in events:
        typer.echo(json.dumps(event) if as_json else format_event(event))


@app.command(epilog="Example: fedloop runs compare runs/fedavg runs/fedadam")
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN …", help="Two runs or more, as for show.")],
    accuracy: Annotated[
        float | None,
        typer.Option(
            "--accuracy",
            min=0,
            max=1,
            metavar="A",
            help="Also the rounds, bytes and time until a run's test accuracy was A or more.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw loss and accuracy over simulated time into this PNG file."
        ),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Compare runs: the keys of their experiments that differ, their figures, and simulations over simulated time."""
    from coordinator.reports import comparison  # imports what `fedloop --help` does not need

    if len(runs) < 2:
        raise UserError("compare needs two runs or more")
    found = [find_run(each, coordinator) for each in runs]
    labels, reports = [each.label for each in found], [each.report() for each in found]
    compared = comparison.compare(labels, reports)
    if accuracy is not None:
        compared["until"] = comparison.until_accuracy(reports, accuracy)
    if plot is not None:
        comparison.draw(plot, labels, reports)
    if as_json:
        print_json(compared)
    else:
        print_output(_comparison_table(compared))


@app.command(epilog="Example: fedloop runs cancel 3f2a")
def cancel(run: RunReference, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Cancel a run on devices; its committed rounds stay."""
    found = find_run(run, coordinator, folders_too=False)
    assert isinstance(found, RemoteRun)
    shown = found.client.post(f"/runs/{found.shown['id']}/cancel")
    typer.echo(json.dumps(shown) if as_json else f"run {found.label} is cancelled")


@app.command(epilog="Example: fedloop runs resume mine --set simulation.workers=4")
def resume(
    run: RunReference,
    sets: Sets = None,
    data_dir: DataDir = None,
    mlflow: Mlflow = None,
    tensorboard: TensorBoard = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Resume a simulation, or a failed or cancelled run on devices, behind its last committed round."""
    from coordinator.reports.trackers import Trackers

    found = find_run(run, coordinator)
    if isinstance(found, RemoteRun):
        if sets:
            raise UserError("--set: the settings of a run on devices stay as they are; leave it out")
        if mlflow is not None or tensorboard is not None:
            raise UserError(
                f"--mlflow and --tensorboard get finished runs; follow this one with: fedloop run --follow {found.label}, and the same options"
            )
        shown = found.client.post(f"/runs/{found.shown['id']}/resume")
        typer.echo(
            json.dumps(shown) if as_json else f"run {found.label} goes on behind round {shown['round']}"
        )
        return
    found.require_simulation("resume")
    _go_on(found, sets or [], data_dir, Trackers(mlflow, tensorboard), as_json)


@app.command(epilog="Example: fedloop runs extend mine --rounds 60")
def extend(
    run: RunReference,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds in all, those done included.")],
    data_dir: DataDir = None,
    mlflow: Mlflow = None,
    tensorboard: TensorBoard = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Go on with a simulation for more rounds; the result is that of a run with so many rounds from the start."""
    from coordinator.reports.trackers import Trackers

    found = find_run(run, coordinator)
    found.require_simulation("extend")
    planned = found.row()["rounds"]
    if rounds <= planned:
        raise UserError(f"--rounds {rounds}: {found.label} has {planned} rounds already; expected more")
    sets = [f"federation.rounds={rounds}"]
    _go_on(found, sets, data_dir, Trackers(mlflow, tensorboard), as_json)


def _go_on(
    found: LocalRun | RemoteRun, sets: Sequence[str], data_dir: Path | None, trackers: Trackers, as_json: bool
) -> None:
    from coordinator.runs import simulation

    assert isinstance(found, LocalRun)
    trackers.check()
    with RichProgress() as progress:
        environment = simulation.Environment(data_dir=data_dir, progress=progress)
        report = simulation.resume(found.run.folder, environment, sets)
        trackers.copy_run(found.run.folder, report, environment.clock())
    show_report(report, found.run.folder, as_json=as_json)


def _score(row: Mapping[str, Any]) -> str:
    """Accuracy on held-out rows; of a model that predicts quantities R2."""
    if row["test_accuracy"] is not None:
        return f"accuracy {format_metric(row['test_accuracy'], 4)}"
    return "-" if row["r2"] is None else f"R2 {format_metric(row['r2'], 4)}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table("id", "name", "state", "round", "score", "started")
    for row in rows:
        is_folder = row["id"] != row["run"]
        cells = (
            row["id"] if is_folder else short_id(row["id"]),
            row["name"],
            row["state"],
            f"{row['round']}/{row['rounds']}",
            _score(row),
            format_time(row["started_at"]) if row["started_at"] else "-",
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _show_lines(
    found: LocalRun | RemoteRun,
    row: Mapping[str, Any],
    report: dict[str, Any],
    devices: Sequence[Mapping[str, Any]] | None,
) -> Iterator[str]:
    yield f"{found.label}  {printable(row['name'])}: {row['state']}, round {row['round']} of {row['rounds']}"
    if row["run"] is not None:
        yield f"run {row['run']}"
    if isinstance(found, RemoteRun) and found.shown["error"]:
        yield printable(found.shown["error"], 1000)
    if row["state"] == "finished":
        yield run_summary(report, found.run.folder if isinstance(found, LocalRun) else None)
    elif _score(row) != "-":
        yield f"test {_score(row)} after round {row['round']}"
    if privacy := report.get("privacy"):
        if row["state"] != "finished":
            yield f"privacy: {privacy['in_words']}"
        if "rounds_left" in privacy:
            budget = "" if privacy["budget"] is None else f" within privacy.budget = {privacy['budget']:g}"
            yield f"{privacy['rounds_left']} more rounds{budget}; devices: fedloop device show DEVICE"
    for notice in report.get("notices", ()):
        yield f"notice: {printable(notice)}"
    if devices is None:
        return
    yield "devices:" if devices else "no device is enrolled; admit one: fedloop device token"
    for device in devices:
        part = "; ".join(reason["words"] for reason in device["reasons"]) or "can take part"
        yield f"  {printable(device['name'])} ({short_id(device['device'])}): {printable(part)}"


def _comparison_table(compared: Mapping[str, Any]) -> Table:
    table = make_table("", *compared["runs"])
    for section in ("experiment", "final", "until"):
        for key, values in compared.get(section, {}).items():
            table.add_row(
                key if section == "experiment" else key.replace("_", " "), *map(_format_cell, values)
            )
    return table


def _format_cell(value: Any) -> Text:
    if value is None:
        return Text("-")
    if isinstance(value, float):
        return Text(f"{value:.6g}")
    text = value if isinstance(value, str) else json.dumps(value)
    is_hash = len(text) == 64
    return Text(printable(f"{text[:16]}…" if is_hash else text))
