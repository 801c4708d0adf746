"""`fedloop-edge predict` and `serve-model`: use the installed model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edge_client.commands.cli_options import AsJson, configuration
from edge_client.errors import UserError

Model = Annotated[
    str | None, typer.Option("--model", help="Its name in the registry, if this device has several.")
]
Release = Annotated[
    Path | None, typer.Option("--release", help="A release folder to use instead of the installed release.")
]


def predict(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Rows: .npy, .npz (array x) or .csv.", metavar="FILE")],
    model: Model = None,
    release: Release = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option("--leave-out", help="Column of a .csv that is not an input, such as the label."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predicts the rows in FILE with the installed model: class and probability, one line each.

    Example: fedloop-edge predict readings.csv --leave-out label
    """
    from edge_client.infer import golden_check
    from edge_client.infer.runtime import load as load_release
    from edge_client.serving.predict import active_release
    from edge_client.serving.predict import predict as predict_rows
    from edge_client.serving.rows import read_rows

    with _release_errors():
        loaded = load_release(release or active_release(configuration(context).state_dir, model))
        golden_check.require(loaded)
        predictions = predict_rows(loaded, read_rows(file, loaded.manifest, tuple(leave_out or ())))
    if as_json:
        release_info = {"model": loaded.manifest.model, "version": loaded.manifest.version}
        typer.echo(json.dumps({**release_info, "predictions": [asdict(each) for each in predictions]}))
        return
    for each in predictions:
        pairs = [(each.label, each.probability)]
        if isinstance(each.label, list) and isinstance(each.probability, list):
            pairs = list(zip(each.label, each.probability, strict=True))
        typer.echo("  ".join(f"{label} {probability:.4f}" for label, probability in pairs))


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
    from edge_client.wire.manifest import ManifestError

    try:
        yield
    except (ManifestError, SelfTestFailed, DataProblem, InvalidRows) as error:
        raise UserError(str(error)) from None
