"""`fedloop run`: federated training on devices, from the command line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands.options import ExperimentFile, Json, Mlflow, RunFolder, Sets, TensorBoard
from coordinator.commands.output import RichProgress
from coordinator.commands.summaries import show_report
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator, OperatorClient, connect, run_id
from coordinator.output_folders import default_folder, require_new
from coordinator.short_ids import short_id

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment
    from coordinator.reports.trackers import Trackers


def run(
    experiment: ExperimentFile = None,
    sets: Sets = None,
    out: RunFolder = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the run, print the beginning of its id, and return.")
    ] = False,
    follow: Annotated[
        str | None,
        typer.Option(
            "--follow",
            help="Follow a run that was started earlier: its id, the beginning of it, or its name.",
            metavar="RUN",
        ),
    ] = None,
    cancel: Annotated[
        str | None, typer.Option("--cancel", help="Cancel a run, named as for --follow.", metavar="RUN")
    ] = None,
    mlflow: Mlflow = None,
    tensorboard: TensorBoard = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Train on the fleet of devices of a running coordinator and report on it.

    A model of your own (package.module:build, or a .keras file) is built here and sent without its code.
    """
    from coordinator.reports.trackers import Trackers

    trackers = Trackers(mlflow, tensorboard)
    if cancel is not None:
        _require_alone("--cancel", experiment, sets, out, detach, follow, mlflow, tensorboard)
        client = connect(coordinator)
        shown = client.post(f"/runs/{run_id(client, cancel)}/cancel")
        typer.echo(json.dumps(shown) if as_json else f"run {short_id(shown['id'])} is cancelled")
        return
    if follow is not None:
        _require_alone("--follow", experiment, sets, None, detach, None)
    if detach and (mlflow is not None or tensorboard is not None):
        raise UserError(
            "--detach returns before the run is finished, and trackers get finished runs; give --mlflow and --tensorboard to --follow"
        )
    if out is not None:
        require_new(out)
    trackers.check()
    submission = _document(experiment, sets or []) if follow is None else None
    client = connect(coordinator)
    if submission is None:
        shown = client.get(f"/runs/{run_id(client, follow or '')}")
    else:
        shown = _submit(client, *submission)
    if detach:
        typer.echo(json.dumps(shown) if as_json else short_id(shown["id"]))
        return
    _follow(client, shown, out, trackers, as_json)


def _submit(client: OperatorClient, document: dict[str, Any], resolved: Experiment) -> dict[str, Any]:
    """Starts a run of the experiment `document`; a model of the user's own is made here and sent with it."""
    from models import user_code

    if not user_code.is_own(resolved.model.name or ""):
        shown: dict[str, Any] = client.post("/runs", {"experiment": document})
        return shown
    from coordinator.operator import own_models

    with RichProgress() as progress:
        return own_models.submit(client, document, resolved, progress)


def _follow(client: Any, shown: dict[str, Any], out: Path | None, trackers: Trackers, as_json: bool) -> None:
    from coordinator.operator import run_follower

    folder = out or default_folder(shown["name"])
    with RichProgress() as progress:
        progress.print(f"run {short_id(shown['id'])}")
        report = run_follower.follow(client, shown["id"], folder, progress)
        trackers.copy_run(folder, report, datetime.now(UTC))
    show_report(report, folder, as_json=as_json)


def _document(experiment: Path | None, sets: list[str]) -> tuple[dict[str, Any], Experiment]:
    """The experiment as written, with absolute paths, and resolved. Checked here so that errors name the file."""
    from coordinator.experiments import experiment as experiments

    document = experiments.read_document(experiment, sets, "devices")
    resolved = experiments.resolve(document, str(experiment) if experiment else "experiment", "devices")
    for table, key in (("data", "path"), ("model", "init")):
        value = getattr(getattr(resolved, table), key)
        if value is not None:
            document[table][key] = value
    return document, resolved


def _require_alone(option: str, *others: object) -> None:
    if any(other for other in others):
        raise UserError(f"{option} takes everything from the run: omit the other options")
