"""Experiment trackers: finished runs and pretrainings are copied to MLflow and to TensorBoard's event files.

A run is copied once it is finished, from its report, so a tracker that fails costs no training, and copying again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from coordinator import extras
from coordinator.errors import RunInterrupted, UserError
from coordinator.reports import mlflow_runs, tensorboard_events
from coordinator.reports.sweep import final_figures
from models.pretrain.recovery.curve import NAME as CURVE
from models.pretrain.recovery.curve import Curve

_OF_STEPS = ("loss", "validation_loss", "lr", "rows_per_second")


class Point(NamedTuple):
    """The figures of one round, or step of a pretraining; round 0 is the initial model. `seconds` since 1970."""

    round: int
    seconds: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Trackers:
    """Where finished runs are copied to.

    Attributes:
        mlflow: tracking URI, such as `sqlite:///mlflow.db` or the address of a server.
        tensorboard: folder of event files, with a folder for each run.
    """

    mlflow: str | None = None
    tensorboard: Path | None = None

    def check(self) -> None:
        """Raises UserError if a tracker is not installed or cannot be reached: before the run, not after it."""
        for part, wanted in (("MLflow", self.mlflow), ("TensorBoard", self.tensorboard)):
            if wanted is not None and (lacking := extras.missing(part)):
                raise UserError(
                    f"--{part.lower()} needs {', '.join(lacking)}, not installed here; {extras.how_to_install(part)}"
                )
        if self.mlflow is not None:
            try:
                mlflow_runs.check(self.mlflow)
            except Exception as error:  # of any kind that its stores raise
                raise UserError(f"--mlflow {self.mlflow}: {error}") from None
        if self.tensorboard is not None and self.tensorboard.exists() and not self.tensorboard.is_dir():
            raise UserError(f"--tensorboard {self.tensorboard}: is a file; expected a folder")

    def copy_run(
        self, folder: Path, report: Mapping[str, Any], finished: datetime, sweep: Path | None = None
    ) -> None:
        """Copies a finished run. `sweep`: folder of the sweep that it belongs to.

        Raises:
            RunInterrupted: a tracker failed; the run is complete without it.
        """
        points = list(_points(report, finished))
        with self._failures(folder):
            if self.tensorboard is not None:
                name = folder.name if sweep is None else f"{sweep.absolute().name}/{folder.name}"
                tensorboard_events.write(self.tensorboard / name, points)
            if self.mlflow is not None:
                experiment, sha256 = report["experiment"], report["final"]["model_sha256"]
                final = final_figures(report)
                mlflow_runs.copy_run(self.mlflow, folder, experiment, sha256, points, final, sweep)

    def copy_pretraining(self, folder: Path, report: Mapping[str, Any], finished: datetime) -> None:
        """Copies a finished pretraining, with the points of its curve. Raises RunInterrupted as `copy_run`."""
        if self.mlflow is None and self.tensorboard is None:
            return
        points = list(_steps(folder, report["config"]["train"]["batch_size"], finished))
        with self._failures(folder):
            if self.tensorboard is not None:
                tensorboard_events.write(self.tensorboard / folder.absolute().name, points)
            if self.mlflow is not None:
                final = {
                    **report["final"],
                    **report["final"].get("metrics", {}),
                    **report.get("validation", {}),
                }
                figures = {
                    name: float(value) for name, value in final.items() if isinstance(value, int | float)
                }
                sha256 = report["final"]["model_sha256"]
                mlflow_runs.copy_run(self.mlflow, folder, report["config"], sha256, points, figures)

    def copy_sweep(self, folder: Path, name: str) -> None:
        """Copies the table and the plot of a sweep, whose runs were copied before. Raises RunInterrupted as `copy_run`."""
        if self.mlflow is not None:
            with self._failures(folder):
                mlflow_runs.copy_sweep(self.mlflow, folder, name)

    @contextmanager
    def _failures(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any kind that a tracker's stores raise
            raise RunInterrupted(
                f"{folder} is finished, but a tracker failed: {error}; --resume with the same options copies it again"
            ) from None


def _points(report: Mapping[str, Any], finished: datetime) -> Iterator[Point]:
    """The rounds, as if the last one ended at `finished`; figures that were not measured are left out."""
    rounds = report["rounds"]
    seconds = finished.timestamp() - sum(row["seconds"] for row in rounds)
    for number, row in enumerate([report["start"], *rounds]):
        seconds += row.get("seconds", 0.0)
        figures = {
            name: float(value)
            for name, value in row.items()
            if name != "round" and isinstance(value, int | float)
        }
        yield Point(number, seconds, figures)


def _steps(folder: Path, batch_size: int, finished: datetime) -> Iterator[Point]:
    """The steps of a pretraining's curve, as if the last one ended at `finished`."""
    rows = list(Curve(folder / CURVE).points())
    durations = [batch_size / rate if (rate := row.get("rows_per_second")) else 0.0 for row in rows]
    seconds = finished.timestamp() - sum(durations)
    for row, duration in zip(rows, durations, strict=True):
        seconds += duration
        figures = {name: float(row[name]) for name in _OF_STEPS if row.get(name) is not None}
        yield Point(int(row["step"]), seconds, figures)
