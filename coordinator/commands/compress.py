"""`fedloop compress` and `fedloop compress-search`: compress a trained model for devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.options import DataDir, Json, Sets
from coordinator.commands.output import RichProgress, print_summary
from coordinator.commands.summaries import compression_summary, search_summary
from coordinator.output_folders import default_folder

Trained = Annotated[Path, typer.Argument(help="Folder of a pretraining or of a finished run.", metavar="DIR")]
Student = Annotated[
    str | None,
    typer.Option(
        "--student",
        help="Model to distil into. Default: the model itself if devices can run it; a search narrows it.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder for the results; an unfinished compression in it is resumed. Default: a new one in runs/.",
    ),
]


DataSet = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Data set for training, calibration and testing of a model from elsewhere: digits, table.csv, package.module:load; "
        "--set data.KEY=VALUE says how to read it, --set model.name=NAME which model its params belong to.",
    ),
]


def compress(
    folder: Trained,
    pipeline: Annotated[
        Path | None,
        typer.Option(
            "--pipeline",
            help="TOML file with the steps. Default: distil if necessary, then the precision that measures best.",
        ),
    ] = None,
    student: Student = None,
    data: DataSet = None,
    sets: Sets = None,
    out: Out = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Compress a trained model for devices, step by step: distil, prune, factorise, quantize.

    DIR is a folder that fedloop pretrain, simulate, run or model export wrote. Writes model.tflite, every step's model, a report and a plot.
    """
    from coordinator.datacenter import compression
    from coordinator.datacenter.compression_request import parse_request
    from coordinator.datacenter.jobs import Environment

    request = parse_request(pipeline, student, sets or [], data)
    destination = out or default_folder("compressed")
    with RichProgress() as progress:
        report = compression.compress(folder, request, destination, Environment(data_dir, progress))
    print_summary(
        {"out": str(destination), **report}, compression_summary(report, destination), as_json=as_json
    )


def compress_search(
    folder: Trained,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Maximum memory of the arena in tflite-micro, or in LiteRT: 64KB, 1MiB."
        ),
    ] = None,
    size: Annotated[str | None, typer.Option("--size", help="Maximum size of model.tflite: 100KB.")] = None,
    latency: Annotated[
        str | None, typer.Option("--latency", help="Maximum latency of a row on this machine: 500us, 2ms.")
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(
            "--accuracy", help="Minimum accuracy, of a quantity R2. Default: that of the model minus 0.02."
        ),
    ] = None,
    first: Annotated[
        bool, typer.Option("--first", help="Stop at the first pipeline that fits, without trying the others.")
    ] = False,
    student: Student = None,
    data: DataSet = None,
    sets: Sets = None,
    out: Out = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Find the pipeline that compresses a trained model to a device's budget, and show the alternatives.

    Writes what fedloop compress would write for the chosen one. If none fits, exits with 1 and names the nearest.
    """
    from coordinator.datacenter import compress_search as searching
    from coordinator.datacenter.compression_request import parse_request
    from coordinator.datacenter.jobs import Environment

    budget = searching.parse_budget(memory, size, latency, accuracy)
    request = parse_request(None, student, sets or [], data)
    destination = out or default_folder("searched")
    with RichProgress() as progress:
        report = searching.search(
            folder, request, budget, destination, Environment(data_dir, progress), first=first
        )
    print_summary({"out": str(destination), **report}, search_summary(report, destination), as_json=as_json)
    if report["search"]["chosen"] is None:
        raise typer.Exit(1)
