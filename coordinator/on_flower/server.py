"""The ServerApp: the round engine over Flower's nodes, with the folder, checkpoint and report of a simulation.

    app = make_server_app(folder)      # of the Flower app, with its experiment.toml

The run's folder `out` decides: if it holds a run of this experiment, this Flower run goes on from its last committed
round. So a SuperLink that died costs the open round, and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from coordinator.errors import UserError
from coordinator.experiments.experiment import resolve
from coordinator.experiments.schema import Experiment
from coordinator.fleets.flower import Federation, FlowerFleet
from coordinator.on_flower.possible import require_possible
from coordinator.on_flower.settings import EXPERIMENT, RunSettings, read_run
from coordinator.rounds.fleet import Fleet
from coordinator.rounds.records import RoundRecord
from coordinator.runs import simulation
from coordinator.toml_files import read_toml

_UPDATES = "updates"
"""Folder within the workspace of a run, for the updates of the open round."""

_log = logging.getLogger("flwr")  # which Flower shows in `flwr run --stream`


def make_server_app(folder: Path) -> ServerApp:
    """The ServerApp of the Flower app in `folder`."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        run(folder, grid, read_run(context))

    return app


def run(folder: Path, grid: Grid, settings: RunSettings) -> dict[str, Any]:
    """Runs the experiment of the Flower app in `folder` to its end, or on to it; returns the report.

    Raises:
        UserError: the experiment cannot run on Flower, its data or a node is wrong, or `out` holds something else.
        RunInterrupted: the run stopped for another reason; another Flower run goes on with it.
    """
    os.chdir(folder)  # workers look for the code of a user there
    path = folder / EXPERIMENT
    experiment = resolve(read_toml(path), str(path), stored=True)
    require_possible(experiment)
    out, progress = settings.out, LogProgress()

    def make_fleet(experiment: Experiment, prepared: simulation.Prepared) -> Fleet:
        updates = prepared.folder / _UPDATES
        shutil.rmtree(updates, ignore_errors=True)
        updates.mkdir()
        return FlowerFleet(
            grid, _federation(experiment, prepared, settings.own_rows), updates, note=progress.note
        )

    environment = simulation.Environment(
        data_dir=settings.data_dir,
        progress=progress,
        make_fleet=make_fleet,
        owns_rows=not settings.own_rows,
        how_to_resume=f"flwr run, with the same app and out = {str(out)!r}",
    )
    if not (out / EXPERIMENT).exists():
        report = simulation.simulate(experiment, out, environment)
    else:
        _require_same(experiment, out)
        report = simulation.resume(out, environment, [f"federation.rounds={experiment.federation.rounds}"])
    final = report["final"]
    _log.info("model %s after round %s, in %s", final["model_sha256"], final["round"], out)
    return report


def _federation(experiment: Experiment, prepared: simulation.Prepared, own_rows: bool) -> Federation:
    keys = ("tflite", "manifest")
    model = dict(prepared.model)
    files = {key: Path(model.pop(key)).read_bytes() for key in keys if key in model}
    return Federation(
        clients=prepared.clients,
        fingerprint="" if own_rows else prepared.data_info["fingerprint"],
        schema=prepared.data_info["schema"] if own_rows else None,
        model=model,
        artifact=files,
        quorum=experiment.federation.min_updates,
        patience_seconds=experiment.devices.patience_seconds,
    )


def _require_same(experiment: Experiment, out: Path) -> None:
    """Refuses a folder that holds a run of another experiment; the number of rounds may differ."""
    stored = out / EXPERIMENT
    if _result_keys(resolve(read_toml(stored), str(stored), stored=True)) != _result_keys(experiment):
        raise UserError(f"out = {str(out)!r} holds a run of another experiment; name another folder")


def _result_keys(experiment: Experiment) -> dict[str, Any]:
    document = experiment.model_dump(mode="json", exclude_none=True)
    del document["federation"]["rounds"], document["simulation"]["workers"], document["devices"]
    return document


class LogProgress:
    """Writes stages, notes and rounds to Flower's log."""

    def __init__(self) -> None:
        self._rounds = 0

    def stage(self, message: str) -> None:
        _log.info("%s", message)

    def note(self, message: str) -> None:
        _log.info("%s", message)

    def begin(self, rounds: int, done: int) -> None:
        self._rounds = rounds

    def round(self, record: RoundRecord) -> None:
        accuracy = "-" if record.test_accuracy is None else f"{record.test_accuracy:.4f}"
        _log.info(
            "round %d/%d  accuracy %s  test loss %.3f  accepted %d of %d  %.2f s",
            *(record.round, self._rounds, accuracy, record.test_loss),
            *(record.accepted, record.selected, record.seconds),
        )

    def trained(self, line: Mapping[str, Any]) -> None:
        """Ignores single steps."""
