"""A worker of inference serving: one process that holds one opened model and computes batch after batch.

It speaks in frames (`edge_client.processes.channel`) over a socket that it has inherited:

    open     model, backend, threads  ->  shapes, and what batches of several sizes take
    infer    id, rows; the rows' bytes  ->  the logits' bytes, and the seconds they took
    measure  sizes, repeats  ->  seconds of a batch by its size
    generate id, prompt, …   ->  events, as the tokens come (`models.serving.generator`)
    cancel   id

An `error` in the answer to `open` says why the model cannot be served. A batch that fails is answered with an `error` too; the worker
goes on. It ends when the socket closes.

Run as `python -P -m models.serving.worker FD MODULE…`: one process that has imported the modules and forks a worker for each socket that
it receives on FD (`edge_client.processes.process.serve_forks`).
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from edge_client.processes.channel import Closed, Frame, receive_frame, send_frame
from edge_client.processes.process import die_with_parent, serve_forks
from edge_client.processes.unneeded_memory import release_library_pages, trim_heap
from models.serving.opening import CannotOpen, OpenedModel, open_model
from models.serving.profiling import measure

if TYPE_CHECKING:
    from models.serving.generator import Generator

Reply = tuple[dict[str, Any], Sequence[bytes]] | None
"""None: no answer."""


class Worker:
    """The state of a worker: its model, once it is open."""

    def __init__(self) -> None:
        self._model: OpenedModel | None = None
        self._generator: Generator | None = None

    @property
    def generates(self) -> bool:
        """Whether `step` has tokens to compute."""
        return self._generator is not None and self._generator.has_work

    def step(self) -> Reply:
        """The events of the next tokens."""
        assert self._generator is not None
        return {"events": self._generator.step()}, ()

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
            case "generate":
                assert self._generator is not None
                events = self._generator.add(frame.values)
                return ({"events": events}, ()) if events else None
            case "cancel":
                assert self._generator is not None
                self._generator.cancel(frame.values["id"])
                return None
        raise AssertionError(frame.values["kind"])

    def _open(self, values: Mapping[str, Any]) -> dict[str, Any]:
        try:
            model = open_model(values["model"], values["backend"], values["threads"])
        except CannotOpen as error:
            return {"error": str(error)}
        try:
            generation = self._open_generator(model, values)
        except CannotOpen as error:
            return {"error": str(error)}
        self._model = model
        facts = {
            **generation,
            "backend": model.backend,
            "input_shape": list(model.input_shape),
            "input_dtype": model.input_dtype,
            "output_shape": list(model.output_shape),
            "vocabulary": model.vocabulary,
            "seconds": measure(model, values["sizes"], values["repeats"]),
        }
        trim_heap()
        release_library_pages()
        return facts

    def _open_generator(self, model: OpenedModel, values: Mapping[str, Any]) -> dict[str, Any]:
        """Whether the model generates, and if not although it predicts tokens, why."""
        if model.spec is None or model.spec.task != "next_token":
            return {"generates": False}
        from models.serving.generation.support import CannotGenerate
        from models.serving.generator import Generator

        try:
            self._generator = Generator(
                model, values["generation"], values["schema"], Path(values["model"]["params"])
            )
        except (CannotGenerate, ValueError) as error:
            if values["generation"]["plan"]:
                raise CannotOpen(str(error)) from error
            return {"generates": False, "why": str(error)}
        return {"generates": True, "length": self._generator.length}

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
    """Answers frames until the channel closes; between them, generates."""
    worker = Worker()
    with suppress(Closed):
        while True:
            if worker.generates and not _has_frame(channel):
                reply = worker.step()
            else:
                reply = worker.handle(receive_frame(channel))
            if reply is not None:
                send_frame(channel, *reply)
    os._exit(0)


def _has_frame(channel: socket.socket) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def main() -> None:
    die_with_parent()
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    # Not for workers of simulations, whose first result would come a twentieth later.
    release_library_pages()
    with (
        socket.socket(fileno=int(descriptor)) as control,
        socket.socket(fileno=serve_forks(control)) as channel,
    ):
        serve(channel)


if __name__ == "__main__":
    main()
