"""Predictions for other programs on this device, over a Unix socket, with rows of several requests in one batch.

A request and its answer are one line of JSON each; a connection may send many, which are answered in order:

    {"id": 7, "x": [[0.0, 0.1, …], …]}
    {"id": 7, "model": "digits:3", "labels": [4, …], "probabilities": [0.98, …]}
    {"id": 8, "error": "rows are [1, 3], digits takes [N, 8, 8]"}

`x` holds rows in the shape of the model's input, or flat. Instead of it `rows` holds rows in natural form, by the model's data
schema: objects from columns to values, or texts. Their answer has the names of the classes, too; of a text to continue those
of the next tokens:

    {"id": 9, "rows": [{"age": 61, "ward": "ICU"}]}
    {"id": 9, "model": "patients:1", "labels": [1], "classes": ["died"], "probabilities": [0.71]}

Requests wait at most `max_wait_seconds` for others, up to
`max_batch` rows. A new active release is opened between two batches (`edge_client.serving.active`). Only the owner can
access the socket.

One thread runs the model, the event loop does the rest. A client's input can end only its own connection.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataProblem
from edge_client.infer.runtime import InvalidRows, check_rows
from edge_client.ota.crash_counter import StartCounter
from edge_client.serving.active import ActiveModel
from edge_client.serving.lines import BLOCK_BYTES, BadRequest, Lines, MemoryBudget
from edge_client.serving.predict import NoRelease, Prediction, next_tokens, predict
from edge_client.serving.records import read_records
from edge_client.serving.rows import Inputs
from edge_client.wire.inference import InferenceManifest

MAX_CONNECTIONS = 64
"""At a time. `edge_client.serving.lines` limits their memory."""

UNREAD_SECONDS = 10.0
"""A client that does not read its answers for so long, once the buffers are full, loses its connection."""

_MAX_ROWS = 4096
_QUEUE_SIZE = 256
"""Requests that may wait for the model; further ones are not read yet."""


@dataclass(frozen=True)
class Batching:
    max_batch: int = 16
    max_wait_seconds: float = 0.002


@dataclass
class Counts:
    """Counts for measuring the effect of batching."""

    requests: int = 0
    rows: int = 0
    batches: int = 0


@dataclass
class _PendingRequest:
    """Rows of one request. `answer`: the model's name and its predictions."""

    x: npt.NDArray[Any]
    answer: asyncio.Future[tuple[str, list[Prediction]]]


_Answer = list[Prediction] | InvalidRows


class Service:
    """The model and the requests that wait for it. Further arguments and errors are those of `ActiveModel`."""

    def __init__(
        self,
        find: Callable[[], Path],
        batching: Batching,
        log: Callable[[str], None] = lambda line: None,
        *,
        starts: StartCounter | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._batching, self._log = batching, log
        self._active = ActiveModel(find, log, starts, now)
        self._queue: asyncio.Queue[_PendingRequest] = asyncio.Queue(_QUEUE_SIZE)
        self._deferred: _PendingRequest | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._budget = MemoryBudget()

    @property
    def model(self) -> str:
        """The model's name and version."""
        return self._active.name

    def end(self) -> None:
        """Makes `serve` answer the pending requests and return."""
        self._ended.set()

    async def serve(self, listener: socket.socket) -> None:
        """Answers on the socket of `edge_client.serving.listening` until `end`."""
        try:
            with ThreadPoolExecutor(1, "model") as thread:
                await self._serve(listener, thread)
        finally:
            self._active.clear_starts()

    async def _serve(self, listener: socket.socket, thread: Executor) -> None:
        server = await asyncio.start_unix_server(self._connected, sock=listener, limit=BLOCK_BYTES)
        work, last = (
            asyncio.create_task(self._run(thread)),
            asyncio.create_task(self._active.clear_starts_once_lasted()),
        )
        ended = asyncio.create_task(self._ended.wait())
        self._log(f"runs {self.model} at {listener.getsockname()}")
        try:
            await asyncio.wait((ended, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # a bug: end, so that clients do not wait forever
        finally:
            server.close()
            for connection in self._connections if work.done() else self._connections - self._busy:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            for task in (ended, work, last):
                task.cancel()
            await asyncio.gather(ended, work, last, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            with suppress(OSError):
                await _send(writer, {"id": None, "error": f"more than {MAX_CONNECTIONS} connections"})
            writer.close()
            return
        self._connections.add(task)
        lines = Lines(reader, self._budget)
        try:
            while not self._ended.is_set() and (line := await lines.next()):
                self._busy.add(task)
                await _send(writer, await self._answer(line))
                self._busy.discard(task)
        except BadRequest as error:
            with suppress(OSError):
                await _send(writer, {"id": None, "error": str(error)})
        except (OSError, asyncio.CancelledError):
            # The client is gone or does not read, or this service ends: write nothing more.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            self._busy.discard(task)
            lines.close()
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        request_id: Any = None
        try:
            request = _parse(line)
            request_id = request.get("id")
            manifest = self._active.loaded.manifest
            inputs = self._inputs(request, manifest)
            waiting = _PendingRequest(inputs.x, asyncio.get_running_loop().create_future())
            await self._queue.put(waiting)
            model, answers = await waiting.answer
            if "rows" in request and self._active.loaded.manifest is not manifest:
                raise BadRequest("another release became active meanwhile; send the rows again")
        except (BadRequest, InvalidRows) as error:
            return {"id": request_id, "error": str(error)}
        if answers[0].value is not None:
            return {"id": request_id, "model": model, "values": [each.value for each in answers]}
        if inputs.last is not None:
            answers = next_tokens(answers, inputs, manifest.data_schema)
        return {
            "id": request_id,
            "model": model,
            "labels": [each.label for each in answers],
            **({"classes": [each.class_name for each in answers]} if "rows" in request else {}),
            "probabilities": [each.probability for each in answers],
        }

    def _inputs(self, request: dict[str, Any], manifest: InferenceManifest) -> Inputs:
        if "rows" not in request:
            return Inputs(self._rows(request), None)
        records = request["rows"]
        if "x" in request:
            raise BadRequest("x and rows are both there; send one of them")
        if not isinstance(records, list) or len(records) > _MAX_ROWS:
            raise BadRequest(f"rows is not a list of 1 to {_MAX_ROWS} rows")
        try:
            inputs = read_records(records, manifest.data_schema, self.model)
        except DataProblem as error:
            raise BadRequest(str(error)) from None
        return replace(inputs, x=check_rows(inputs.x, manifest))

    def _rows(self, request: dict[str, Any]) -> npt.NDArray[Any]:
        spec = self._active.loaded.manifest.input
        try:
            x = np.asarray(request["x"])
        except KeyError:
            raise BadRequest("x is missing: rows to predict; or rows, in natural form") from None
        except (ValueError, OverflowError) as error:
            raise BadRequest(f"x does not hold rows of numbers: {error}") from None
        if x.ndim == 0 or not 0 < len(x) <= _MAX_ROWS:
            raise BadRequest(f"x is {list(x.shape)}, expected 1 to {_MAX_ROWS} rows")
        if x.shape[1:] == (math.prod(spec.shape),):
            x = x.reshape(len(x), *spec.shape)
        return check_rows(x, self._active.loaded.manifest)

    async def _run(self, thread: Executor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            model, answers = await loop.run_in_executor(thread, self._predict, [each.x for each in batch])
            for each, answer in zip(batch, answers, strict=True):
                if each.answer.done():
                    continue  # its connection is gone
                if isinstance(answer, InvalidRows):
                    each.answer.set_exception(answer)
                else:
                    each.answer.set_result((model, answer))
            self.counts.requests += len(batch)
            self.counts.rows += sum(len(each.x) for each in batch)
            self.counts.batches += 1

    def _predict(self, parts: Sequence[npt.NDArray[Any]]) -> tuple[str, list[_Answer]]:
        """Runs in the model's thread."""
        try:
            self._active.update()
        except NoRelease as none:
            return "", [InvalidRows(str(none)) for _ in parts]
        return self.model, list(self._answers(parts))

    def _answers(self, parts: Sequence[npt.NDArray[Any]]) -> Iterator[_Answer]:
        """One answer for each part. An error in one part does not affect the others."""
        try:
            results = predict(self._active.loaded, np.concatenate(parts))
        # A release with another input may have been activated meanwhile; RuntimeError is the interpreter's.
        except (ValueError, RuntimeError, MemoryError) as error:
            if len(parts) == 1:
                yield InvalidRows(str(error) or type(error).__name__)
            else:
                for part in parts:
                    yield from self._answers([part])
            return
        start = 0
        for part in parts:
            yield results[start : start + len(part)]
            start += len(part)

    async def _next_batch(self) -> list[_PendingRequest]:
        """The requests that arrive within the wait, up to the largest batch; a request is never split.

        Each connection has at most one pending request: once all have one in the batch, no more can arrive.
        """
        first = self._deferred or await self._queue.get()
        self._deferred = None
        batch, rows = [first], len(first.x)
        end = asyncio.get_running_loop().time() + self._batching.max_wait_seconds
        while rows < self._batching.max_batch and len(batch) < len(self._connections):
            try:
                async with asyncio.timeout_at(end):
                    following = await self._queue.get()
            except TimeoutError:
                break
            if rows + len(following.x) > self._batching.max_batch:
                self._deferred = following
                break
            batch.append(following)
            rows += len(following.x)
        return batch


async def _send(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    """Raises TimeoutError, an OSError, if the client does not read."""
    writer.write((json.dumps(answer) + "\n").encode())
    async with asyncio.timeout(UNREAD_SECONDS):
        await writer.drain()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not JSON: {error}"[:300]) from None
    if not isinstance(request, dict):
        raise BadRequest('expected an object such as {"id": 1, "x": [[…]]}')
    return request


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")
