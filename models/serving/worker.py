"""A worker of inference serving: one process that holds one opened model and computes batch after batch.

It speaks in frames (`edge_client.processes.channel`) over a socket that it has inherited:

    open     model, backend, threads  ->  shapes, and what batches of several sizes take
    infer    id, rows; the rows' bytes  ->  the logits' bytes, and the seconds they took
    measure  sizes, repeats  ->  seconds of a batch by its size

An `error` in the answer to `open` says why the model cannot be served. A batch that fails is answered with an `error` too; the worker
goes on. It ends when the socket closes.

Run as `python -P -m models.serving.worker FD MODULE…`: one process that has imported the modules and forks a worker for each socket that
it receives on FD (`edge_client.processes.process.serve_forks`).
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from edge_client.processes.channel import Closed, Frame, receive_frame, send_frame
from edge_client.processes.process import die_with_parent, serve_forks
from models.serving.opening import CannotOpen, OpenedModel, open_model
from models.serving.profiling import measure

Reply = tuple[dict[str, Any], Sequence[bytes]]


class Worker:
    """The state of a worker: its model, once it is open."""

    def __init__(self) -> None:
        self._model: OpenedModel | None = None

    def handle(self, frame: Frame) -> Reply:
        match frame.values["kind"]:
            case "open":
                return self._open(frame.values), ()
            case "infer":
                return self._infer(frame.values, frame.blobs[0])
            case "measure":
                assert self._model is not None
                sizes, repeats = frame.values["sizes"], frame.values["repeats"]
                return {"seconds": measure(self._model, sizes, repeats)}, ()
        raise AssertionError(frame.values["kind"])

    def _open(self, values: Mapping[str, Any]) -> dict[str, Any]:
        try:
            model = open_model(values["model"], values["backend"], values["threads"])
        except CannotOpen as error:
            return {"error": str(error)}
        self._model = model
        return {
            "backend": model.backend,
            "input_shape": list(model.input_shape),
            "input_dtype": model.input_dtype,
            "output_shape": list(model.output_shape),
            "vocabulary": model.vocabulary,
            "seconds": measure(model, values["sizes"], values["repeats"]),
        }

    def _infer(self, values: Mapping[str, Any], content: bytes) -> Reply:
        model = self._model
        assert model is not None
        began = time.perf_counter()
        try:
            # A copy, because a frame's bytes cannot be written to, which torch warns of.
            rows = np.frombuffer(bytearray(content), model.input_dtype)
            logits = model.compute(rows.reshape(values["rows"], *model.input_shape))
            answer = np.ascontiguousarray(logits, np.float32)
        except Exception as error:  # of a user's code or a library
            reason = " ".join(str(error).split())[:500]
            return {"id": values["id"], "error": f"{type(error).__name__}: {reason}"}, ()
        return {"id": values["id"], "seconds": time.perf_counter() - began}, (answer.tobytes(),)


def serve(channel: socket.socket) -> NoReturn:
    """Answers frames until the channel closes."""
    worker = Worker()
    with suppress(Closed):
        while True:
            values, blobs = worker.handle(receive_frame(channel))
            send_frame(channel, values, blobs)
    os._exit(0)


def main() -> None:
    die_with_parent()
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    with (
        socket.socket(fileno=int(descriptor)) as control,
        socket.socket(fileno=serve_forks(control)) as channel,
    ):
        serve(channel)


if __name__ == "__main__":
    main()
