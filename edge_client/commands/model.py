"""`fedloop-edge predict` and `serve-model`: use the installed model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_client.commands.cli_options import AsJson, configuration
from edge_client.errors import UserError

if TYPE_CHECKING:
    from edge_client.infer.runtime import Described, LoadedRelease, Predictor
    from edge_client.serving.rows import Inputs, Reading

Model = Annotated[
    str | None, typer.Option("--model", help="Its name in the registry, if this device has several.")
]
Release = Annotated[
    Path | None, typer.Option("--release", help="A release folder to use instead of the installed release.")
]

Own = Annotated[
    str | None,
    typer.Option(
        "--own",
        help="A run of a personalised strategy, by name or id: predicts with this device's own model of it.",
        metavar="RUN",
    ),
]

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Rows: a table (.csv, .parquet), images or a folder of them, texts (.txt, one a line), or arrays (.npy, .npz).",
        metavar="[FILE]...",
    ),
]

LeaveOut = Annotated[
    list[str] | None,
    typer.Option("--leave-out", help="Column of a table that is not an input."),
]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", help="Of a table's text, such as latin-1. Default: as the training table."),
]


def predict(
    context: typer.Context,
    files: Files = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="A data set of this device: predicts its held-out rows; with FILE, reads that as the data set is read.",
            metavar="NAME",
        ),
    ] = None,
    model: Model = None,
    release: Release = None,
    own: Own = None,
    leave_out: LeaveOut = None,
    encoding: Encoding = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write class and probabilities to a .csv, .json or .parquet.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predicts rows with the installed model: class and probability, one line each, and the accuracy where classes are known.

    Example: fedloop-edge predict readings.csv, or fedloop-edge predict --data digits
    """
    from edge_client.serving.predict import (
        accuracy,
        errors,
        predict_inputs,
        write_predictions,
    )
    from edge_client.serving.rows import Reading

    if not files and data is None:
        raise UserError("there is nothing to predict: give FILE, or --data NAME, a data set of this device")
    if out is not None and out.resolve() in {file.resolve() for file in files or ()}:
        raise UserError(f"--out {out}: is the file that is read; name another one")
    if own is not None and (model is not None or release is not None):
        raise UserError("--own is a model of this device; leave --model and --release out")
    with _release_errors():
        loaded = _predictor(configuration(context).state_dir, model, release, own)
        inputs = _rows(context, loaded.manifest, files or [], data, Reading(tuple(leave_out or ()), encoding))
        predictions = predict_inputs(loaded, inputs)
    scored = accuracy(predictions, inputs.y)
    found = errors(predictions, inputs.y, loaded.manifest.data_schema)
    if out is not None:
        write_predictions(out, predictions)
    if as_json:
        document = {"model": loaded.manifest.model, "version": loaded.manifest.version, "accuracy": scored}
        rows = {"predictions": [asdict(each) for each in predictions]}
        typer.echo(json.dumps({**document, **({"metrics": found} if found else {}), **rows}))
        return
    if out is None:
        for each in predictions:
            typer.echo(each.line())
    _print_scored(scored, found, len(predictions))


def _predictor(state_dir: Path, model: str | None, release: Path | None, own: str | None) -> Predictor:
    """The model to predict with."""
    from edge_client.serving import own_model
    from edge_client.serving.predict import active_release
    from edge_client.train.interpreter import without_notices

    if own is None:
        return _load(release or active_release(state_dir, model))
    with without_notices():
        return own_model.load(state_dir, own)


def _load(release: Path) -> LoadedRelease:
    """The release, after its golden check."""
    from edge_client.infer import golden_check
    from edge_client.infer.runtime import load
    from edge_client.train.interpreter import without_notices

    with without_notices():
        loaded = load(release)
        golden_check.require(loaded)
    return loaded


def _print_scored(accuracy: float | None, errors: Mapping[str, float | None] | None, rows: int) -> None:
    """Prints how good the predictions are; nothing where the labels are not known."""
    if accuracy is not None:
        typer.echo(f"accuracy {accuracy:.4f} on {rows} rows whose class is known", err=True)
    if errors is not None:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in errors.items() if value is not None)
        typer.echo(f"{figures} on {rows} rows", err=True)


def _rows(
    context: typer.Context,
    manifest: Described,
    files: Sequence[Path],
    data: str | None,
    reading: Reading,
) -> Inputs:
    """The rows to predict, and their classes, or quantities in their own unit, where they are known."""
    from edge_client.data import open_data
    from edge_client.data.connector import DataProblem
    from edge_client.data.rows import RowsConnector
    from edge_client.infer.runtime import check_rows
    from edge_client.serving.data_set_file import read_as_data_set
    from edge_client.serving.rows import Inputs, checked_arrays, concatenate, is_natural, read_rows

    known = configuration(context).data if data is not None else {}
    if data is not None:
        if data not in known:
            raise UserError(
                f"--data {data}: this device has no such data set; it has {', '.join(known) or 'none'}"
            )
        connector = open_data(known[data], manifest.schema)
        if not files:
            held_out = connector.held_out()
            if not len(held_out):
                raise DataProblem(f"--data {data}: holds out no rows; see its options held_out and split")
            scale = manifest.data_schema.label_scale
            known_labels = held_out.y * scale[1] + scale[0] if scale else held_out.y
            return Inputs(check_rows(held_out.x, manifest), known_labels)
        if isinstance(connector, RowsConnector):
            reading = replace(reading, moments=connector.moments)

    def read(file: Path) -> Inputs:
        if data is None or is_natural(file, manifest.data_schema):
            return read_rows(file, manifest, reading)
        return checked_arrays(file, read_as_data_set(file, known[data], reading), manifest)

    return concatenate([read(file) for file in files])


def serve_model(
    context: typer.Context,
    path: Annotated[Path, typer.Option("--socket", help="Unix socket to listen on.")],
    model: Model = None,
    release: Release = None,
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="Largest batch, in rows.")] = 16,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, max=1000, help="How long a request waits for others.")
    ] = 2.0,
) -> None:
    """Serves predictions of the installed model to programs on this device, one JSON object per line, until stopped.

    A request is {"id": 1, "x": [row, …]}. A newly installed release is used without a restart.
    Example: fedloop-edge serve-model --socket /run/user/1000/fedloop.sock
    """
    import asyncio

    from edge_client.ota.crash_counter import StartCounter
    from edge_client.serving.listening import listening
    from edge_client.serving.predict import active_release
    from edge_client.serving.service import Batching, Service

    state_dir = configuration(context).state_dir

    def find() -> Path:
        return release or active_release(state_dir, model)

    async def serve() -> None:
        batching = Batching(max_batch, max_wait_ms / 1000)
        starts = StartCounter(state_dir, path) if release is None else None
        # The socket first: a second service must not open the model, nor count starts of the first.
        with listening(path) as listener:
            service = Service(find, batching, lambda line: typer.echo(line, err=True), starts=starts)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, service.end)
            await service.serve(listener)

    with _release_errors():
        asyncio.run(serve())


@contextmanager
def _release_errors() -> Iterator[None]:
    """Reports an unusable release or invalid rows as UserError."""
    from edge_client.data.connector import DataProblem
    from edge_client.infer.runtime import InvalidRows
    from edge_client.train.golden import SelfTestFailed
    from edge_client.train.resolve import CannotRun
    from edge_client.wire.manifest import ManifestError

    try:
        yield
    except (ManifestError, SelfTestFailed, CannotRun, DataProblem, InvalidRows) as error:
        raise UserError(str(error)) from None
