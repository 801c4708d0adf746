"""`fedloop predict`: a trained model on rows in their natural form."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from coordinator.commands.options import Json
from coordinator.commands.output import format_errors, make_table, print_json, print_lines, print_output
from coordinator.errors import UserError
from coordinator.model_references import is_version
from coordinator.operator.client import Coordinator, connect

if TYPE_CHECKING:
    from coordinator.datacenter.predictions import Model, Reading

Out = Annotated[
    Path | None, typer.Option("--out", help="Write class and probabilities to a .csv, .json or .parquet.")
]
SiteRows = Annotated[
    Path | None,
    typer.Option(
        "--site-rows",
        help='Table of the site\'s training rows, for a model with data.scale = "site".',
        metavar="TABLE",
    ),
]
LeaveOut = Annotated[
    list[str] | None,
    typer.Option("--leave-out", help="Column of the table that is not an input; may be repeated."),
]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", help="Of the table's text, such as latin-1. Default: as the training table."),
]

DeviceClass = Annotated[
    str | None,
    typer.Option(
        "--device-class",
        help="Of a simulation with device classes: predict by the model of this one.",
        metavar="CLASS",
    ),
]


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder of a finished run, a pretraining, a compression or a release; or a version at the coordinator, such as digits:3.",
            metavar="MODEL",
        ),
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Rows: a table (.csv, .parquet), images or a folder of them, texts (.txt, one a line), or arrays (.npy, .npz).",
            metavar="FILE...",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
    site_rows: SiteRows = None,
    leave_out: LeaveOut = None,
    encoding: Encoding = None,
    explain_columns: Annotated[
        bool,
        typer.Option(
            "--explain-columns", help="Show how each column is read, and whether FILE fits; predict nothing."
        ),
    ] = False,
    device_class: DeviceClass = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Predict the rows of FILE: class and probability of each, and the accuracy where the table has the label.

    Columns are found by name, in any order; the model's data schema says how each is read.
    """
    from coordinator.datacenter import predictions

    if explain_columns and out is not None:
        raise UserError("--out: --explain-columns predicts nothing; leave one of the two out")
    if not (files or explain_columns):
        raise UserError("FILE is missing: name the rows to predict, or give --explain-columns")
    reading = predictions.Reading(tuple(files or ()), site_rows, tuple(leave_out or ()), encoding)
    with _opened(model, coordinator, device_class) as source:
        if explain_columns:
            _explain_columns(source, reading, as_json)
            return
        found = predictions.predict(source, reading, out)
    lines = found.pop("lines")
    if as_json:
        print_json({"model": source.name, **found})
        return
    if out is None:
        print_lines(lines)
    if found["accuracy"] is not None:
        rows = len(found["predictions"])
        typer.echo(f"accuracy {found['accuracy']:.4f} on {rows} rows whose class is known", err=True)
    if "metrics" in found:
        typer.echo(f"{format_errors(found['metrics'])} on {len(found['predictions'])} rows", err=True)


@contextmanager
def _opened(model: Path, coordinator: str | None, device_class: str | None) -> Iterator[Model]:
    """The model in a folder; or the version of that name at the coordinator, whose files are fetched for as long as it is used."""
    from coordinator.datacenter import predictions

    if model.exists() or not is_version(str(model)):
        yield predictions.open_model(model, device_class)
        return
    if device_class is not None:
        raise UserError(
            "--device-class is for the folder of a simulation, and MODEL is a version; leave it out"
        )
    from coordinator.operator import version_export

    client = connect(coordinator)
    version = client.get(f"/versions/{quote(str(model), safe='')}")
    with tempfile.TemporaryDirectory() as scratch:
        version_export.export(client, version, Path(scratch) / "model", lambda count: None)
        yield replace(predictions.open_model(Path(scratch) / "model"), name=version["version"])


def _explain_columns(source: Model, reading: Reading, as_json: bool) -> None:
    """Shows the columns, and of files that fit the number of their rows."""
    from coordinator.datacenter import predictions

    if reading.files:
        rows = predictions.count_rows(source, reading)
    elif given := [name for name, value in reading.options().items() if value]:
        raise UserError(f"{given[0]}: says how a FILE is read; name the FILE too")
    _explain(source.schema, as_json)
    if reading.files:
        named = ", ".join(map(str, reading.files))
        typer.echo(f"{named}: {rows} row{'s' * (rows != 1)} can be predicted", err=True)


def _explain(schema: Any, as_json: bool) -> None:
    if as_json:
        print_json(schema.to_document())
        return
    table = make_table("column", "kind", "unit", "read as")
    for column in schema.columns:
        table.add_row(column.name, column.kind, column.unit, _reading(column, schema.scale))
    if schema.label:
        kind = "a quantity" if schema.label_scale is not None else f"one of {', '.join(schema.classes)}"
        table.add_row(schema.label, "label", "", kind)
    for name in schema.ignored:
        table.add_row(name, "ignored", "", "")
    if not schema.columns:
        shape = " x ".join(map(str, schema.input_shape))
        table.add_row("x", schema.kind, "", _input(schema) or f"{schema.input_dtype} arrays of {shape}")
    print_output(table)


def _input(schema: Any) -> str:
    """How an image or a text is read; empty for arrays."""
    if image := schema.image:
        height, width, channels = image.size(schema.input_shape)
        scaled = f"pixel / {image.divisor:g}"
        scaled = f"({scaled} - mean) / deviation of each channel" if image.mean else scaled
        kind = "colour" if channels == 3 else "grey"
        return f"{width} x {height} pixels in {kind}, 0 to {image.maximum}: {scaled}"
    if text := schema.text:
        tokens = f"{text.unit} in lower case" if text.lower else text.unit
        count = sum(map(bool, text.vocabulary))
        known = f", {count} {'tokens' if text.unit == 'bpe' else 'of them known'}" if count else ""
        return f"{tokens}{known}; at most {schema.input_shape[0]}, filled up with id {text.padding}"
    return ""


def _reading(column: Any, scale: str) -> str:
    if column.kind == "category":
        more = ["any other text"] if column.other else []
        return f"0 or 1 for each of {', '.join([*column.categories, *more])}"
    what = "days since 1970-01-01" if column.kind == "date" else "number"
    if column.mean is not None:
        return f"({what} - {column.mean:.6g}) / {column.deviation:.6g}; the mean where it is missing"
    return f"{what}, scaled by the site's own rows" if scale == "site" else what
