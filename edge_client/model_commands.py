"""`fedloop-edge predict` and `serve-model`: the model that arrived, of use."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edge_client.errors import UserMistake
from edge_client.given import AsJson, configuration

Model = Annotated[
    str | None, typer.Option("--model", help="Its name in the registry, where this device has several.")
]
Release = Annotated[
    Path | None, typer.Option("--release", help="A release folder, rather than what is installed.")
]


def predict(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Rows: .npy, .npz (array x) or .csv.", metavar="FILE")],
    model: Model = None,
    release: Release = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option("--leave-out", help="Column of a .csv that is no input, such as the label."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What the installed model says of the rows in FILE: class and probability, a line each.

    Example: fedloop-edge predict readings.csv --leave-out label
    """
    from edge_client.infer import selftest
    from edge_client.infer.predict import active_release, predictions
    from edge_client.infer.rows import read_rows
    from edge_client.infer.runtime import load as load_release

    with _fit_release():
        loaded = load_release(release or active_release(configuration(context).state_dir, model))
        selftest.require(loaded)
        found = predictions(loaded, read_rows(file, loaded.manifest, tuple(leave_out or ())))
    if as_json:
        described = {"model": loaded.manifest.model, "version": loaded.manifest.version}
        typer.echo(json.dumps({**described, "predictions": [asdict(each) for each in found]}))
        return
    for each in found:
        pairs = [(each.label, each.probability)]
        if isinstance(each.label, list) and isinstance(each.probability, list):
            pairs = list(zip(each.label, each.probability, strict=True))
        typer.echo("  ".join(f"{label} {probability:.4f}" for label, probability in pairs))


def serve_model(
    context: typer.Context,
    path: Annotated[Path, typer.Option("--socket", help="Unix socket to listen on.")],
    model: Model = None,
    release: Release = None,
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="Most rows that are run together.")] = 16,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, max=1000, help="How long a request waits for others.")
    ] = 2.0,
) -> None:
    """Answers programs of this device with the installed model, a JSON object a line, until it is ended.

    A request is {"id": 1, "x": [row, …]}. A newly installed release is picked up without a restart.
    Example: fedloop-edge serve-model --socket /run/user/1000/fedloop.sock
    """
    import asyncio

    from edge_client.infer.listening import listening
    from edge_client.infer.predict import active_release
    from edge_client.infer.service import Batching, Service
    from edge_client.ota.served import Starts

    state_dir = configuration(context).state_dir

    def find() -> Path:
        return release or active_release(state_dir, model)

    async def serve() -> None:
        batching = Batching(max_batch, max_wait_ms / 1000)
        starts = Starts(state_dir, path) if release is None else None
        # The socket first: whoever does not get it opens no model, and counts nothing of the service that has it.
        with listening(path) as listener:
            service = Service(find, batching, lambda line: typer.echo(line, err=True), starts=starts)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, service.end)
            await service.serve(listener)

    with _fit_release():
        asyncio.run(serve())


@contextmanager
def _fit_release() -> Iterator[None]:
    """A release that cannot be used here, and rows that do not fit it, are a person's to mend."""
    from edge_client.connectors.connector import DataProblem
    from edge_client.infer.runtime import WrongRows
    from edge_client.train.golden import SelfTestFailed
    from edge_client.wire.manifest import ManifestError

    try:
        yield
    except (ManifestError, SelfTestFailed, DataProblem, WrongRows) as error:
        raise UserMistake(str(error)) from None
