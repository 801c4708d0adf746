"""Runs in MLflow, through its client: params, metrics by round, and the files of the run's folder.

An MLflow experiment is named as the experiment. A run is found again by its folder, so that it is not copied twice.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator import json_values

if TYPE_CHECKING:
    from coordinator.reports.trackers import Point

_FOLDER, _MODEL, _PARENT = "fedloop.folder", "fedloop.model_sha256", "mlflow.parentRunId"
_SWEEP_FILES = ("plan.json", "sweep.csv", "sweep.json", "sweep.png")
# Limits of MLflow: characters of a key and of a param, entries of a request.
_KEY_CHARACTERS, _PARAM_CHARACTERS, _PARAMS, _METRICS = 250, 6000, 100, 1000

T = TypeVar("T")


def check(uri: str) -> None:
    """Raises an error of MLflow's if it cannot use `uri`. A database that does not exist is made."""
    _client(uri).search_experiments(max_results=1)


def copy_run(
    uri: str,
    folder: Path,
    settings: Mapping[str, Any],
    model_sha256: str,
    points: Sequence[Point],
    final: Mapping[str, float | None],
    sweep: Path | None = None,
) -> None:
    """Copies a finished run or pretraining unless MLflow has it.

    Args:
        settings: all of its configuration, with a `name`, which is that of the MLflow experiment.
        final: figures of the final model by name; None: not measured.
        sweep: folder of the sweep whose MLflow run is its parent.
    """
    from mlflow.entities import Metric, Param

    client = _client(uri)
    experiment_id = _experiment_id(client, settings["name"])
    tags = {_FOLDER: str(folder.absolute()), _MODEL: model_sha256}
    for earlier in _find(client, experiment_id, tags):
        if earlier.info.status == "FINISHED":
            return
        client.delete_run(earlier.info.run_id)  # copied in part
    parent = {} if sweep is None else {_PARENT: _sweep_run(client, experiment_id, sweep)}
    start, end = (int(1000 * point.seconds) for point in (points[0], points[-1]))
    run = client.create_run(experiment_id, start, tags={**tags, **parent}, run_name=folder.name).info.run_id
    params = [Param(_key(key), _text(value)) for key, value in json_values.flatten(settings).items()]
    for some in _batches(params, _PARAMS):
        client.log_batch(run, params=some)
    metrics = [
        Metric(_key(name), value, int(1000 * point.seconds), point.round)
        for point in points
        for name, value in point.figures.items()
    ]
    metrics += [
        Metric(f"final.{name}", value, end, points[-1].round)
        for name, value in final.items()
        if value is not None
    ]
    for some in _batches(metrics, _METRICS):
        client.log_batch(run, metrics=some)
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            client.log_artifact(run, str(path))
    client.set_terminated(run, end_time=end)


def copy_sweep(uri: str, folder: Path, name: str) -> None:
    """Adds the table and the plot of a sweep to its MLflow run, the parent of its runs."""
    client = _client(uri)
    run = _sweep_run(client, _experiment_id(client, name), folder)
    for file in _SWEEP_FILES:
        client.log_artifact(run, str(folder / file))
    client.set_terminated(run)


def _client(uri: str) -> Any:
    # Read when MLflow is imported. It reports its use to its makers otherwise, and the steps of its database on standard error.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _experiment_id(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


def _sweep_run(client: Any, experiment_id: str, folder: Path) -> str:
    """The MLflow run of a sweep, made unless it exists."""
    tags = {_FOLDER: str(folder.absolute())}
    found = _find(client, experiment_id, tags)
    run = found[0] if found else client.create_run(experiment_id, tags=tags, run_name=folder.absolute().name)
    return str(run.info.run_id)


def _find(client: Any, experiment_id: str, tags: Mapping[str, str]) -> list[Any]:
    """Runs with these tags. Compared here: a filter cannot quote every character of a folder's name."""
    token, found = None, []
    while True:
        page = client.search_runs([experiment_id], page_token=token)
        found += [each for each in page if tags.items() <= each.data.tags.items()]
        token = page.token
        if not token:
            return found


def _key(name: str) -> str:
    return re.sub(r"[^\w.\-/ ]", "_", name)[:_KEY_CHARACTERS]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _PARAM_CHARACTERS else text[: _PARAM_CHARACTERS - 1] + "…"


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
