"""Predictions for other programs of this device, over a Unix socket, rows of several of them run together.

A request and its answer are one line of JSON each; a connection may send many, and they are answered in order:

    {"id": 7, "x": [[0.0, 0.1, …], …]}
    {"id": 7, "model": "digits:3", "labels": [4, …], "probabilities": [0.98, …]}
    {"id": 8, "error": "rows are [1, 3], digits takes [N, 8, 8]"}

`x` is rows, nested as the model's input or flat. Requests wait at most `max_wait_seconds` for others, up to `max_batch` rows.
A new active release is picked up between two batches (`edge_client.infer.active`). The socket belongs to its user alone.

One thread runs the model, the event loop does the rest. What a client sends can end its own connection and nothing else.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from edge_client.infer.active import ActiveModel
from edge_client.infer.predict import NoRelease, Prediction, predictions
from edge_client.infer.runtime import WrongRows, checked_rows
from edge_client.ota.served import Starts

LINE_BYTES = 8 * 2**20
"""Of one request."""

MOST_CONNECTIONS = 64
"""At a time. Each may hold twice `LINE_BYTES` of a request that is not whole yet."""

UNREAD_SECONDS = 10.0
"""Who does not read its answers for so long, once the buffers are full, loses its connection."""

_MOST_ROWS = 4096
_WAITING = 256
"""Requests that wait for the model; who sends more waits before it is read."""


@dataclass(frozen=True)
class Batching:
    max_batch: int = 16
    max_wait_seconds: float = 0.002


@dataclass
class Counts:
    """For whoever wants to know what batching brought."""

    requests: int = 0
    rows: int = 0
    batches: int = 0


@dataclass
class _Waiting:
    """Rows of one request. `answer`: the model that was asked, and what it said."""

    x: npt.NDArray[Any]
    answer: asyncio.Future[tuple[str, list[Prediction]]]


_Answer = list[Prediction] | WrongRows


class BadRequest(ValueError):
    """The line is no request; the message says why."""


class Service:
    """The model and those who wait for it.

    Args:
        find: the folder of the release to run now.
        say: one line for the log.
        starts: told when a release is opened, and when it lasted.
        now: seconds, never jumps.

    Raises:
        UserMistake, ManifestError, SelfTestFailed: there is no release, or it cannot be used here.
    """

    def __init__(
        self,
        find: Callable[[], Path],
        batching: Batching,
        say: Callable[[str], None] = lambda line: None,
        *,
        starts: Starts | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._batching, self._say = batching, say
        self._active = ActiveModel(find, say, starts, now)
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(_WAITING)
        self._held: _Waiting | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def model(self) -> str:
        """Its name and version."""
        return self._active.name

    def end(self) -> None:
        """Has `serve` answer what was asked so far, and return."""
        self._ended.set()

    async def serve(self, listener: socket.socket) -> None:
        """Answers on the socket, as `edge_client.infer.listening` has it, until `end`."""
        try:
            with ThreadPoolExecutor(1, "model") as thread:
                await self._served(listener, thread)
        finally:
            self._active.settled()

    async def _served(self, listener: socket.socket, thread: Executor) -> None:
        server = await asyncio.start_unix_server(self._connected, sock=listener, limit=LINE_BYTES)
        work, last = (
            asyncio.create_task(self._run(thread)),
            asyncio.create_task(self._active.settle_when_it_lasted()),
        )
        ended = asyncio.create_task(self._ended.wait())
        self._say(f"runs {self.model} at {listener.getsockname()}")
        try:
            await asyncio.wait((ended, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # a fault of ours: an end, rather than clients that wait for ever
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
        if len(self._connections) >= MOST_CONNECTIONS:
            with suppress(OSError):
                await _tell(writer, {"id": None, "error": f"more than {MOST_CONNECTIONS} connections"})
            writer.close()
            return
        self._connections.add(task)
        try:
            while not self._ended.is_set() and (line := await _line(reader)):
                self._busy.add(task)
                await _tell(writer, await self._answer(line))
                self._busy.discard(task)
        except BadRequest as error:
            with suppress(OSError):
                await _tell(writer, {"id": None, "error": str(error)})
        except (OSError, asyncio.CancelledError):
            # The other side is gone or does not read, or this service ends: nothing more is to be written.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            self._busy.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        name: Any = None
        try:
            request = _parsed(line)
            name = request.get("id")
            waiting = _Waiting(self._rows(request), asyncio.get_running_loop().create_future())
            await self._queue.put(waiting)
            model, found = await waiting.answer
        except (BadRequest, WrongRows) as error:
            return {"id": name, "error": str(error)}
        return {
            "id": name,
            "model": model,
            "labels": [each.label for each in found],
            "probabilities": [each.probability for each in found],
        }

    def _rows(self, request: dict[str, Any]) -> npt.NDArray[Any]:
        described = self._active.loaded.manifest.input
        try:
            x = np.asarray(request["x"])
        except KeyError:
            raise BadRequest("x is missing: rows to predict") from None
        except (ValueError, OverflowError) as error:
            raise BadRequest(f"x is no rows of numbers: {error}") from None
        if x.ndim == 0 or not 0 < len(x) <= _MOST_ROWS:
            raise BadRequest(f"x is {list(x.shape)}, expected 1 to {_MOST_ROWS} rows")
        if x.shape[1:] == (math.prod(described.shape),):
            x = x.reshape(len(x), *described.shape)
        return checked_rows(x, self._active.loaded.manifest)

    async def _run(self, thread: Executor) -> None:
        """One batch after the other."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._batch()
            model, answers = await loop.run_in_executor(thread, self._ask, [each.x for each in batch])
            for each, answer in zip(batch, answers, strict=True):
                if each.answer.done():
                    continue  # its connection is gone
                if isinstance(answer, WrongRows):
                    each.answer.set_exception(answer)
                else:
                    each.answer.set_result((model, answer))
            self.counts.requests += len(batch)
            self.counts.rows += sum(len(each.x) for each in batch)
            self.counts.batches += 1

    def _ask(self, parts: Sequence[npt.NDArray[Any]]) -> tuple[str, list[_Answer]]:
        """In the model's thread."""
        try:
            self._active.renew()
        except NoRelease as none:
            return "", [WrongRows(str(none)) for _ in parts]
        return self.model, list(self._answers(parts))

    def _answers(self, parts: Sequence[npt.NDArray[Any]]) -> Iterator[_Answer]:
        """One for each part. What is wrong with one of them is told to nobody else."""
        try:
            found = predictions(self._active.loaded, np.concatenate(parts))
        # A release that takes other rows may have come in between; RuntimeError is the interpreter's.
        except (ValueError, RuntimeError, MemoryError) as error:
            if len(parts) == 1:
                yield WrongRows(str(error) or type(error).__name__)
            else:
                for part in parts:
                    yield from self._answers([part])
            return
        start = 0
        for part in parts:
            yield found[start : start + len(part)]
            start += len(part)

    async def _batch(self) -> list[_Waiting]:
        """What comes within the wait, up to the largest batch; a request is never cut.

        A connection waits for its answer before its next request counts: once each has one here, no other can come.
        """
        first = self._held or await self._queue.get()
        self._held = None
        batch, rows = [first], len(first.x)
        end = asyncio.get_running_loop().time() + self._batching.max_wait_seconds
        while rows < self._batching.max_batch and len(batch) < len(self._connections):
            try:
                async with asyncio.timeout_at(end):
                    following = await self._queue.get()
            except TimeoutError:
                break
            if rows + len(following.x) > self._batching.max_batch:
                self._held = following
                break
            batch.append(following)
            rows += len(following.x)
        return batch


async def _line(reader: asyncio.StreamReader) -> bytes:
    """One request; empty at the end.

    Raises:
        BadRequest: it is too long to be one, and where the next begins is unknown.
    """
    try:
        return await reader.readline()
    except ValueError:
        raise BadRequest(f"a request has more than {LINE_BYTES} bytes") from None


async def _tell(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    """Raises TimeoutError, an OSError: nobody reads."""
    writer.write((json.dumps(answer) + "\n").encode())
    async with asyncio.timeout(UNREAD_SECONDS):
        await writer.drain()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not JSON: {error}"[:300]) from None
    if not isinstance(request, dict):
        raise BadRequest('expected an object such as {"id": 1, "x": [[…]]}')
    return request


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number, and not finite")
