"""`fedloop jobs`: simulations, pretrainings, plans, compressions and exports that run at a coordinator.

The commands only call the coordinator and print.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from coordinator.commands.options import Sets, Shown, command_group, remote_command
from coordinator.commands.output import RichProgress, format_bytes, format_event, format_time, make_table
from coordinator.errors import RunInterrupted, UserError
from coordinator.operator.client import Coordinator, OperatorClient, connect, job_id
from coordinator.short_ids import short_id
from edge_client.wire.strict import printable

app = command_group("Jobs at a coordinator: simulate, pretrain, plan, compress and export on its machine.")

JobReference = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Its id, the beginning of it, or its name.", show_default=False),
]

KINDS = ("simulation", "pretraining", "plan", "compression", "export")
_LIVE = ("queued", "running")
_POLL_SECONDS = 1.0


@remote_command(app, example="fedloop jobs start my.toml --kind pretraining --set train.steps=200")
def start(
    client: OperatorClient,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE.toml]", help="The file of the command that does the same. Default: its defaults."
        ),
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help=f"{', '.join(KINDS)}.")] = "simulation",
    source: Annotated[
        str | None,
        typer.Option(
            "--source", help="Finished job whose model a compression or an export starts from.", metavar="JOB"
        ),
    ] = None,
    priority: Annotated[
        int, typer.Option("--priority", min=-10, max=10, help="Higher values start first.")
    ] = 0,
    sets: Sets = None,
) -> Shown:
    """Start a job from the file of the command that does the same, such as an experiment. The coordinator checks it."""
    from coordinator.toml_files import read_toml

    if kind not in KINDS:
        raise UserError(f"--kind {kind!r}: expected one of {', '.join(KINDS)}")
    request = {
        "kind": kind,
        "document": {} if file is None else json.loads(json.dumps(read_toml(file), default=str)),
        "sets": sets or [],
        "source": None if source is None else job_id(client, source),
        "priority": priority,
    }
    created = client.post("/jobs", request)
    return created, [
        f"job {short_id(created['id'])} is {created['state']}; follow it: fedloop jobs logs {short_id(created['id'])} --follow"
    ]


@remote_command(app, "list", example="fedloop jobs list --kind pretraining")
def list_jobs(
    client: OperatorClient,
    kind: Annotated[str | None, typer.Option("--kind", help="Only jobs of this kind.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="Only jobs in this state.")] = None,
) -> Shown:
    """List jobs, newest first."""
    jobs = client.get("/jobs", limit=1000, kind=kind, state=state)
    return jobs, _table(jobs) if jobs else ["no jobs; start one: fedloop jobs start experiment.toml"]


@remote_command(app, example="fedloop jobs show 3f2a")
def show(client: OperatorClient, job: JobReference) -> Shown:
    """Show a job: how far it is, why it failed, and which files it left."""
    shown = client.get(f"/jobs/{job_id(client, job)}")
    return shown, _lines(shown)


@app.command(epilog="Example: fedloop jobs logs 3f2a --follow")
def logs(
    job: JobReference,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for further events, until the job ends.")
    ] = False,
    coordinator: Coordinator = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON.")] = False,
) -> None:
    """Print the events of a job, oldest first. With --follow, exits with 1 unless the job finishes."""
    client = connect(coordinator)
    identity = job_id(client, job)
    last = 0
    while True:
        state = client.get(f"/jobs/{identity}")["state"]
        for event in client.pages(f"/jobs/{identity}/events", "events", after=last):
            last = event["id"]
            typer.echo(json.dumps(event) if as_json else format_event(event))
        if not follow or state not in _LIVE:
            break
        time.sleep(_POLL_SECONDS)
    if follow and state != "finished":
        raise RunInterrupted(
            f"job {short_id(identity)} is {state}; why: fedloop jobs show {short_id(identity)}"
        )


@remote_command(app, example="fedloop jobs cancel 3f2a")
def cancel(client: OperatorClient, job: JobReference) -> Shown:
    """End a job now; what it has stored stays."""
    return _act(client, job, "cancel", "is cancelled")


@remote_command(app, example="fedloop jobs resume 3f2a")
def resume(client: OperatorClient, job: JobReference) -> Shown:
    """Start a job again that failed, was cancelled or interrupted; it goes on where it stopped."""
    return _act(client, job, "resume", "is queued again")


@remote_command(app, example="fedloop jobs remove 3f2a")
def remove(client: OperatorClient, job: JobReference) -> Shown:
    """Remove a job that has ended, with its files."""
    identity = job_id(client, job)
    client.delete(f"/jobs/{identity}")
    return {"id": identity}, [f"job {short_id(identity)} is removed"]


@app.command(epilog="Example: fedloop jobs fetch 3f2a --out runs/fetched")
def fetch(
    job: JobReference,
    out: Annotated[Path, typer.Option("--out", help="Folder to write into; new or empty.", metavar="DIR")],
    coordinator: Coordinator = None,
) -> None:
    """Fetch the files that a job left, such as its report and its model."""
    from coordinator.output_folders import require_new

    require_new(out)
    client = connect(coordinator)
    shown = client.get(f"/jobs/{job_id(client, job)}")
    if not shown["files"]:
        raise UserError(f"job {short_id(shown['id'])} is {shown['state']} and has no files")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with RichProgress() as progress:
            for name in shown["files"]:
                progress.note(f"{name}, {format_bytes(shown['files'][name])}")
                client.fetch(f"/jobs/{shown['id']}/files/{quote(name)}", out / name, lambda count: None)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    typer.echo(f"{len(shown['files'])} files in {out}/")


def _act(client: OperatorClient, job: str, action: str, outcome: str) -> Shown:
    shown = client.post(f"/jobs/{job_id(client, job)}/{action}")
    return shown, [f"job {short_id(shown['id'])} {outcome}"]


def _table(jobs: list[dict[str, Any]]) -> Table:
    table = make_table("id", "kind", "name", "state", "progress", "created")
    for job in jobs:
        cells = (
            short_id(job["id"]),
            job["kind"],
            job["name"],
            job["state"],
            _progress(job["progress"]),
            format_time(job["created_at"]),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _progress(progress: Mapping[str, Any]) -> str:
    if progress["done"] is None:
        return progress["stage"] or "-"
    return f"{progress['unit']} {progress['done']}/{progress['total'] or '?'}"


def _lines(job: Mapping[str, Any]) -> Iterator[str]:
    progress = job["progress"]
    yield f"{short_id(job['id'])}  {job['kind']} {printable(job['name'])}: {job['state']}, {printable(_progress(progress))}"
    yield f"job {job['id']}, by {printable(job['created_by'])}, attempt {job['attempts']}"
    if job["error"]:
        yield printable(job["error"], 4000)
    figures = [f"{key} {progress[key]:.4f}" for key in ("loss", "accuracy") if progress[key] is not None]
    if figures:
        yield ", ".join(figures)
    if job["state"] in ("failed", "cancelled", "interrupted"):
        yield f"start it again: fedloop jobs resume {short_id(job['id'])}"
    for name, size in job["files"].items():
        yield f"  {name}, {format_bytes(size)}"
    if job["files"]:
        yield f"fetch them: fedloop jobs fetch {short_id(job['id'])} --out DIR"
