"""`fedloop export`: a release folder from a compressed model, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.command_options import DataDir, Json
from coordinator.errors import UserError
from edge_client.wire.rollouts import is_release


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of a compression, of a pretraining or of a finished run; or a .keras file.",
            metavar="DIR",
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="Of the model in the registry.")],
    out: Annotated[Path, typer.Option("--out", help="Release folder to make; new or empty.")],
    version: Annotated[int, typer.Option("--version", min=1, help="Of the model in the registry.")] = 1,
    tflite: Annotated[
        Path | None,
        typer.Option(
            "--tflite", help="File to release. Default: DIR/model.tflite, else float32 from its params."
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="Of the file, such as static-int8. Default: as DIR/model.json says; of a run static-int8.",
        ),
    ] = None,
    device_class: Annotated[
        list[str] | None,
        typer.Option("--device-class", help="Class of devices it is for; may be repeated. Default: any."),
    ] = None,
    dataset: Annotated[
        str, typer.Option("--dataset", help="Name of the data on which devices may evaluate it.")
    ] = "",
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="Data set that a .keras file is calibrated and tried on, such as digits."
        ),
    ] = None,
    real_rows: Annotated[
        int,
        typer.Option(
            "--real-rows", min=0, max=1024, help="At most so many test rows go along; 0: none leave."
        ),
    ] = 64,
    max_accuracy_drop: Annotated[
        float | None,
        typer.Option(
            "--max-accuracy-drop",
            min=0.0,
            max=1.0,
            help="How far below the float model its accuracy on test rows may be, as a fraction. "
            "Default: 0.02 where it is quantized here, 0.05 for a file that is there.",
        ),
    ] = None,
    tflite_runtime: Annotated[
        Path | None,
        typer.Option(
            "--tflite-runtime-python",
            envvar="FEDLOOP_TFLITE_RUNTIME_PYTHON",
            help="Interpreter of an environment with tflite-runtime; without one that runtime is not claimed.",
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a release folder: the model's file with a manifest of golden answers, tried on every runtime.

    The manifest claims the runtimes that answered right. The report keeps the reason of each that did not.
    The float params that a federated run ended with are quantized first.
    """
    from coordinator import exporting
    from coordinator.display import RichProgress
    from coordinator.pretraining import Surroundings

    if not is_release(name, version):
        raise UserError(
            f"--name {name!r} --version {version}: expected 1 to 63 small letters, digits and dashes, no dash at the "
            "beginning, and a version below 1,000,000,000"
        )
    wanted = exporting.Wanted(
        name,
        version,
        tflite,
        precision,
        tuple(device_class or ()),
        {"dataset": dataset, "real_rows": real_rows},
        tflite_runtime,
        data,
        max_accuracy_drop,
    )
    with RichProgress(Console(stderr=True)) as progress:
        report = exporting.export(folder, wanted, out, Surroundings(data_dir, progress))
    if as_json:
        typer.echo(json.dumps({"out": str(out), **report}, indent=2))
        return
    typer.echo(
        f"{name}:{version}, {report['precision']}, {report['bytes']:,} bytes, accuracy {report['accuracy']:.4f}"
    )
    for verdict in report["verdicts"]:
        typer.echo(f"  {verdict['runtime']:<15} {verdict['refused'] or 'passes'}")
    typer.echo(f"release in {out}/")
