"""`fedloop compress` and `fedloop compress-search`: a trained model made fit for devices, from the command line."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.command_options import DataDir, Json, Sets

Trained = Annotated[Path, typer.Argument(help="Folder of a pretraining or of a finished run.", metavar="DIR")]
Student = Annotated[
    str | None,
    typer.Option(
        "--student",
        help="Model to distil into. Default: the model itself where devices can run it; a search narrows it.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder for the results; one begun before is gone on with. Default: a new one in runs/."
    ),
]


def compress(
    folder: Trained,
    pipeline: Annotated[
        Path | None,
        typer.Option(
            "--pipeline", help="TOML file with the steps. Default: distil if need be, quantize to int8."
        ),
    ] = None,
    student: Student = None,
    sets: Sets = None,
    out: Out = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a trained model fit for devices, step by step: distil, prune, factorise, quantize.

    DIR is what fedloop pretrain, simulate or run has left. Leaves model.tflite, every step's model, a report and a plot.
    """
    from coordinator import compressing
    from coordinator.display import RichProgress, compressed_table
    from coordinator.pretraining import Surroundings

    asked = compressing.resolve(pipeline, student, sets or [])
    where = out or _new_folder("compressed")
    with RichProgress(Console(stderr=True)) as progress:
        report = compressing.compress(folder, asked, where, Surroundings(data_dir, progress))
    if as_json:
        typer.echo(json.dumps({"out": str(where), **report}, indent=2))
    else:
        Console(soft_wrap=True).print(compressed_table(report, where), highlight=False)


def compress_search(
    folder: Trained,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Of the arena in tflite-micro, or in LiteRT, at most: 64KB, 1MiB."),
    ] = None,
    size: Annotated[str | None, typer.Option("--size", help="Of model.tflite, at most: 100KB.")] = None,
    latency: Annotated[
        str | None, typer.Option("--latency", help="Of a row, on this machine, at most: 500us, 2ms.")
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option("--accuracy", help="At least. Default: the model's own less 0.02."),
    ] = None,
    first: Annotated[
        bool, typer.Option("--first", help="End with the first pipeline that fits, without the others.")
    ] = False,
    student: Student = None,
    sets: Sets = None,
    out: Out = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Find the pipeline that takes a trained model into a device's budget, and show what else there is.

    Leaves what fedloop compress would leave of the chosen one. Exits with 1, and says what came nearest, if none fits.
    """
    from coordinator import compress_search as searching
    from coordinator import compressing
    from coordinator.display import RichProgress, searched_table
    from coordinator.pretraining import Surroundings

    budget = searching.budget(memory, size, latency, accuracy)
    asked = compressing.resolve(None, student, sets or [])
    where = out or _new_folder("searched")
    with RichProgress(Console(stderr=True)) as progress:
        report = searching.search(folder, asked, budget, where, Surroundings(data_dir, progress), first=first)
    if as_json:
        typer.echo(json.dumps({"out": str(where), **report}, indent=2))
    else:
        console = Console(soft_wrap=True)
        console.width = max(console.width, 110)  # its figures are of use only whole
        console.print(searched_table(report, where), highlight=False)
    if report["search"]["chosen"] is None:
        raise typer.Exit(1)


def _new_folder(kind: str) -> Path:
    return Path("runs") / f"{kind}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
