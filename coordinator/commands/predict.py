"""`fedloop predict`: a trained model on rows in their natural form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.commands.options import Json
from coordinator.commands.output import format_errors, make_table, print_json, print_lines, print_output
from coordinator.errors import UserError
from edge_client.wire.strict import printable

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


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder of a finished run, a pretraining, a compression or a release.", metavar="MODEL"
        ),
    ],
    file: Annotated[
        Path, typer.Argument(help="Rows: a table (.csv, .parquet), or arrays (.npy, .npz).", metavar="FILE")
    ],
    out: Out = None,
    site_rows: SiteRows = None,
    leave_out: LeaveOut = None,
    encoding: Encoding = None,
    explain_columns: Annotated[
        bool, typer.Option("--explain-columns", help="Show how each column is read, and predict nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict the rows of FILE: class and probability of each, and the accuracy where the table has the label.

    Columns are found by name, in any order; the model's data schema says how each is read.
    """
    from coordinator.datacenter import predictions

    source = predictions.open_model(model)
    if explain_columns:
        if out is not None:
            raise UserError("--out: --explain-columns predicts nothing; leave one of the two out")
        _explain(source.schema, as_json)
        return
    skipped = tuple(leave_out or ())
    found = predictions.predict(
        source, file, site_rows=site_rows, leave_out=skipped, encoding=encoding, out=out
    )
    if as_json:
        print_json({"model": source.name, **found})
        return
    if out is None:
        print_lines(map(_line, found["predictions"]))
    if found["accuracy"] is not None:
        rows = len(found["predictions"])
        typer.echo(f"accuracy {found['accuracy']:.4f} on {rows} rows whose class is known", err=True)
    if "metrics" in found:
        typer.echo(f"{format_errors(found['metrics'])} on {len(found['predictions'])} rows", err=True)


def _line(prediction: Mapping[str, Any]) -> str:
    if prediction["value"] is not None:
        return f"{prediction['value']:.6g}"
    if isinstance(prediction["label"], list):
        pairs = zip(prediction["label"], prediction["probability"], strict=True)
        return "  ".join(f"{label} {probability:.4f}" for label, probability in pairs)
    return f"{printable(prediction['class_name'], 200)} {prediction['probability']:.4f}"


def _explain(schema: Any, as_json: bool) -> None:
    if as_json:
        print_json(asdict(schema))
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
        table.add_row("x", schema.input_dtype, "", f"arrays of {shape}")
    print_output(table)


def _reading(column: Any, scale: str) -> str:
    if column.kind == "category":
        more = ["any other text"] if column.other else []
        return f"0 or 1 for each of {', '.join([*column.categories, *more])}"
    what = "days since 1970-01-01" if column.kind == "date" else "number"
    if column.mean is not None:
        return f"({what} - {column.mean:.6g}) / {column.deviation:.6g}; the mean where it is missing"
    return f"{what}, scaled by the site's own rows" if scale == "site" else what
