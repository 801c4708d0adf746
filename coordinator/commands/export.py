"""`fedloop export`: a release folder from a compressed model, from the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.commands.options import DataDir, Json
from coordinator.commands.output import RichProgress, print_json, print_lines
from coordinator.errors import UserError
from edge_client.wire.rollouts import MANIFEST_NAME, is_release

Source = Annotated[
    Path,
    typer.Argument(
        help="Folder of a compression, of a pretraining, of a finished run or of fedloop model export; or a .keras file.",
        metavar="DIR",
    ),
]
Name = Annotated[str, typer.Option("--name", help="Name of the model in the registry.")]
Out = Annotated[Path, typer.Option("--out", help="Release folder to create; new or empty.")]
Version = Annotated[
    int, typer.Option("--version", min=1, help="Version number of the model in the registry.")
]
Tflite = Annotated[
    Path | None,
    typer.Option(
        "--tflite", help="File to release. Default: DIR/model.tflite, else float32 from its params."
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="Precision of the file, such as static-int8. Default: as DIR/model.json says; of a run static-int8, or dynamic-int8 if it predicts a quantity.",
    ),
]
DeviceClasses = Annotated[
    list[str] | None,
    typer.Option("--device-class", help="Class of devices it is for; may be repeated. Default: any."),
]
EvaluationData = Annotated[
    str, typer.Option("--dataset", help="Name of the data on which devices may evaluate it.")
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Data set for calibration and testing: digits, table.csv or package.module:load. "
        "Required for a .keras file and for a model from elsewhere; others have rows of their own.",
    ),
]
DataSets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="data.KEY=VALUE: how to read that data; model.name=NAME, model.KEY=VALUE: the model that params from elsewhere "
        "belong to. May be repeated.",
        metavar="KEY=VALUE",
    ),
]
RealRows = Annotated[
    int,
    typer.Option(
        "--real-rows",
        min=0,
        max=1024,
        help="Publish at most this many test rows in the manifest, of data marked as public. Default: none.",
    ),
]
MaxAccuracyDrop = Annotated[
    float | None,
    typer.Option(
        "--max-accuracy-drop",
        min=0.0,
        max=1.0,
        help="How far below the float model its accuracy on test rows may be, as a fraction. "
        "Default: 0.02 if it is quantized here, 0.05 for an existing file.",
    ),
]
TfliteRuntime = Annotated[
    Path | None,
    typer.Option(
        "--tflite-runtime-python",
        envvar="FEDLOOP_TFLITE_RUNTIME_PYTHON",
        help="Python interpreter with tflite-runtime; without it that runtime is not claimed.",
    ),
]


def export(
    folder: Source,
    name: Name,
    out: Out,
    version: Version = 1,
    tflite: Tflite = None,
    precision: Precision = None,
    device_class: DeviceClasses = None,
    dataset: EvaluationData = "",
    data: Data = None,
    sets: DataSets = None,
    real_rows: RealRows = 0,
    max_accuracy_drop: MaxAccuracyDrop = None,
    tflite_runtime: TfliteRuntime = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a release folder: the model's file with a manifest of golden answers, tested on every runtime.

    The manifest claims the runtimes that answered correctly. The report holds the reason for each that did not.
    The float params of a federated run are quantized first.
    """
    from coordinator.datacenter import release_export, training_data
    from coordinator.datacenter.jobs import Environment

    if not is_release(name, version):
        raise UserError(
            f"--name {name!r} --version {version}: expected 1 to 63 small letters, digits and dashes, no dash at the "
            "beginning, and a version below 1,000,000,000"
        )
    request = release_export.ReleaseRequest(
        name,
        version,
        tflite,
        precision,
        tuple(device_class or ()),
        {"dataset": dataset, "real_rows": real_rows},
        tflite_runtime,
        training_data.parse_data_options(data, _tables(sets or []), "export"),
        max_accuracy_drop,
    )
    with RichProgress() as progress:
        report = release_export.export(folder, request, out, Environment(data_dir, progress))
    if published := report["golden"]["real_rows"]:
        typer.echo(_published_warning(published, real_rows, out), err=True)
    title = f"{name}:{version}, {report['precision']}, {report['bytes']:,} bytes"
    figure = f"R2 {report['r2']:.4f}" if "r2" in report else f"accuracy {report['accuracy']:.4f}"
    accuracy = f"{figure} on {report['test_rows']} {report['scored']}"
    lines = (f"{title}, {accuracy}", *_report_lines(report), f"release in {out}/")
    if as_json:
        print_json({"out": str(out), **report})
    else:
        print_lines(lines)


def _published_warning(published: int, requested: int, out: Path) -> str:
    fewer = (
        f" ({requested} were requested, there is no room or data for more)" if published < requested else ""
    )
    return (
        f"PUBLISHED: {published} rows{fewer} of the data are in {out / MANIFEST_NAME}, readable by every device and everyone "
        "with the release"
    )


def _report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    if (run := report["run"]) is not None:
        float_accuracy = (
            f"; the float params have {report['float_accuracy']:.4f} there"
            if "float_accuracy" in report
            else ""
        )
        yield (
            f"  the run reported {run['test_accuracy']:.4f}, of its float params on {run['test_rows']} rows{float_accuracy}"
        )
    golden = report["golden"]
    yield (
        f"  {golden['rows']} golden rows, tolerance {100 * golden['share_of_span']:.2g} % of the logits' span, "
        f"answers of the {golden['asked_of']}"
    )
    for verdict in report["verdicts"]:
        yield f"  {verdict['runtime']:<15} {verdict['refused'] or 'passes'}"


def _tables(sets: list[str]) -> dict[str, Any]:
    """The tables `data` and `model` of `--set`."""
    from coordinator.experiments.experiment import apply_settings

    tables = apply_settings({}, sets)
    if other := [key for key in tables if key not in ("data", "model")]:
        raise UserError(f"--set {other[0]}: expected data.KEY=VALUE or model.KEY=VALUE")
    return tables
