"""`fedloop sweep`: an experiment over values of its keys and over seeds, from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from coordinator.commands.options import DataDir, ExperimentFile, Json, Mlflow, RunFolder, Sets, TensorBoard
from coordinator.commands.output import RichProgress, format_metric, make_table, print_summary
from coordinator.errors import NothingLearnt, UserError
from coordinator.output_folders import default_folder

if TYPE_CHECKING:
    from coordinator.experiments.grid import Combination

Over = Annotated[
    list[str] | None,
    typer.Option(
        "--over",
        help="A key and its values, each as for --set; repeated, every combination is run.",
        metavar="KEY=VALUE,VALUE",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        min=1,
        help="Seeds of each combination, counted up from the experiment's. Default: 1.",
    ),
]


_SHOWN = ("test_accuracy", "test_loss", "auc", "perplexity", "r2", "mae")
"""Figures of the printed table; `sweep.csv` has all."""


def sweep(
    experiment: ExperimentFile = None,
    over: Over = None,
    seeds: Seeds = None,
    sets: Sets = None,
    out: RunFolder = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Resume the sweep in this folder: finished runs are kept, the others continue.",
            metavar="DIR",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            max=1024,
            help="Runs at once. Default: the cores, divided by the workers of a run.",
        ),
    ] = None,
    data_dir: DataDir = None,
    mlflow: Mlflow = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Simulate an experiment over values of its keys and over seeds; compare them in one table and one plot.

    Writes sweep.csv, sweep.json, sweep.png and a folder for each run. docs/sweeps.md describes them.
    """
    from coordinator.reports.trackers import Trackers
    from coordinator.runs import sweep as runs
    from coordinator.runs.simulation import Environment

    trackers = Trackers(mlflow, tensorboard)

    def copy(run: Path, report: Mapping[str, Any]) -> None:
        trackers.copy_run(run, report, environment.clock(), run.parent)

    with RichProgress() as progress:
        environment = Environment(data_dir=data_dir, progress=progress)
        if resume is not None:
            if experiment is not None or over or seeds or sets or out is not None:
                raise UserError(
                    "--resume takes everything from its folder: omit EXPERIMENT, --over, --seeds, --set and --out"
                )
            folder = resume
            trackers.check()
            document = runs.resume(folder, environment, jobs=jobs, on_finished=copy)
        else:
            combinations = _combinations(experiment, sets or [], over or [], seeds or 1)
            name = combinations[0].experiments[0].name
            folder = out or default_folder(f"{name}-sweep")
            trackers.check()
            document = runs.sweep(name, combinations, folder, environment, jobs=jobs, on_finished=copy)
        trackers.copy_sweep(folder, document["name"])
    print_summary({"out": str(folder), **document}, _summary(document, folder), as_json=as_json)
    _require_learnt(folder, document)


def _require_learnt(folder: Path, document: Mapping[str, Any]) -> None:
    """Raises NothingLearnt: no round changed the model of some runs; names them."""
    from coordinator.reports.folder_state import learnt_nothing
    from coordinator.reports.run_folders import read_report

    runs = [run for row in document["rows"] for run in row["folders"]]
    unchanged = [run for run in runs if learnt_nothing(read_report(folder / run))]
    if unchanged:
        why = (
            "no round changed the model of these runs, whose figures are those of the initial model; the reasons are in events.jsonl of "
            f"their folders in {folder}/:"
        )
        raise NothingLearnt("\n  ".join([why, *unchanged]))


def _combinations(file: Path | None, sets: list[str], over: list[str], seeds: int) -> list[Combination]:
    from coordinator.experiments import experiment as experiments
    from coordinator.experiments import grid

    document = experiments.read_document(file, sets)
    return grid.expand(document, grid.parse_axes(over), seeds, str(file) if file else "experiment")


def _summary(document: Mapping[str, Any], folder: Path) -> Group:
    """A row for each combination: the mean of the main figures over its seeds, and half its 95 % confidence interval."""
    names = [name for name in _SHOWN if name in document["figures"]]
    headings = [part for name in names for part in (name.replace("_", " "), "±")]
    table = make_table(*document["keys"], "seeds", *headings, right=("seeds", *headings))
    for row in document["rows"]:
        figures = [row["figures"][name] for name in names]
        cells = [
            format_metric(value, 4)
            for each in figures
            for value in (each["mean"], None if each["high"] is None else each["high"] - each["mean"])
        ]
        table.add_row(*row["values"].values(), str(row["n"]), *cells)
    return Group(
        table,
        "",
        f"mean over seeds, ± half its 95 % confidence interval (Student's t); all figures, plot and runs in {folder}/",
    )
