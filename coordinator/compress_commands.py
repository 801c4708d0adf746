"""`fedloop compress`: a trained model made fit for devices, from the command line."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.fleet_commands import Sets
from coordinator.pretrain_commands import DataDir, Json


def compress(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a pretraining or of a finished run.", metavar="DIR")
    ],
    student: Annotated[
        str | None,
        typer.Option(
            "--student", help="Model to distil into. Default: none where devices can run the model itself."
        ),
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the results; new or empty. Default: runs/compressed-<time>."),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a trained model fit for devices: distil it if need be, then quantize it.

    DIR is what fedloop pretrain, simulate or run has left. Leaves float32 and int8 .tflite files and a report.
    """
    from coordinator import compressing
    from coordinator.display import RichProgress, compressed_table
    from coordinator.pretraining import Surroundings

    asked = compressing.resolve(student, sets or [])
    where = out or Path("runs") / f"compressed-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    with RichProgress(Console(stderr=True)) as progress:
        report = compressing.compress(folder, asked, where, Surroundings(data_dir, progress))
    if as_json:
        typer.echo(json.dumps({"out": str(where), **report}, indent=2))
    else:
        Console(soft_wrap=True).print(compressed_table(report, where), highlight=False)
