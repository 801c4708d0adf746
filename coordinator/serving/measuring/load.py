"""Load on a server of inference: requests over connections that are kept open, and what became of each.

A closed loop sends the next request of a connection once it has the answer, so it slows down with the server; an open loop sends each
request when it is due, and counts its time from then.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

_LOST = "connection lost"
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Load:
    """What became of requests: `statuses` counts them by status; `seconds` of those with 200, in the order of their ends."""

    statuses: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    wall: float = 0.0
    """Seconds that all of it took."""
    lost: int = 0
    """Connections that ended without an answer."""
    codes: dict[str, int] = field(default_factory=dict)
    """Failures by the code of the error."""
    bodies: list[tuple[int, bytes]] = field(default_factory=list)
    """Number of the request and its answer, if they are kept."""

    @property
    def failed(self) -> int:
        return self.lost + sum(count for status, count in self.statuses.items() if status != 200)

    def count(self, status: int, body: bytes, seconds: float) -> None:
        """An answer; status 0: none came."""
        if status == 200:
            self.seconds.append(seconds)
        else:
            code = _code_of(status, body)
            self.codes[code] = self.codes.get(code, 0) + 1
        if status:
            self.statuses[status] = self.statuses.get(status, 0) + 1
        else:
            self.lost += 1


def random_rows(rng: np.random.Generator, count: int, facts: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Rows of a model: numbers from 0 to 1, or ids below its vocabulary. `facts`: what its workers say of it as they open it."""
    shape = (count, *facts["input_shape"])
    if facts["input_dtype"] == "int32":
        return rng.integers(0, max(facts["vocabulary"], 1), shape, np.int32)
    return rng.random(shape, np.float32)


def json_request(
    path: str, x: npt.NDArray[Any], outputs: Sequence[str] = ("logits",), headers: str = "", **parameters: Any
) -> bytes:
    """A whole HTTP request in JSON for rows `x`, as FP32, or INT32 if they are ids. `headers`: further ones, each with its CRLF."""
    body = {
        "inputs": [{**_described(x), "data": x.ravel().tolist()}],
        "outputs": [{"name": name} for name in outputs],
        "parameters": parameters,
    }
    return http_request(path, json.dumps(body).encode(), headers)


def binary_request(
    path: str, x: npt.NDArray[Any], outputs: Sequence[str] = ("logits",), headers: str = "", **parameters: Any
) -> bytes:
    """A whole HTTP request with binary tensors, for the request and for the answer."""
    content = x.astype(np.int32 if x.dtype.kind in "iu" else np.float32).tobytes()
    document = {
        "inputs": [{**_described(x), "parameters": {"binary_data_size": len(content)}}],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        "parameters": parameters,
    }
    head = json.dumps(document).encode()
    return http_request(path, head + content, f"{headers}Inference-Header-Content-Length: {len(head)}\r\n")


def http_request(path: str, body: bytes, headers: str = "") -> bytes:
    """A POST as bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def closed_loop(
    port: int,
    requests: Sequence[bytes],
    connections: int,
    *,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    total: int | None = None,
    until: Callable[[], bool] | None = None,
    keeps: bool = False,
) -> Load:
    """Each connection sends its next request once it has the answer: `total` requests in all, or until `until` is true.

    A connection that ends without an answer is not opened again.

    Raises:
        OSError: a connection cannot be made.
    """
    load = Load()
    sent, start = 0, time.perf_counter()

    async def run() -> None:
        nonlocal sent
        reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        try:
            while (total is None or sent < total) and not (until is not None and until()):
                number, sent = sent, sent + 1
                began = time.perf_counter()
                status, body = await _exchange(reader, writer, requests[number % len(requests)])
                load.count(status, body, time.perf_counter() - began)
                if not status:
                    return
                if keeps:
                    load.bodies.append((number, body))
        finally:
            writer.close()

    await asyncio.gather(*(run() for _ in range(connections)))
    load.wall = time.perf_counter() - start
    return load


@dataclass(frozen=True)
class Sent:
    """A request of an open loop. `seconds`: until its answer, from when it was due; `lag`: until it was sent, from then.

    `status`: 0 if the connection ended without an answer.
    """

    status: int
    seconds: float
    lag: float


async def open_loop(
    port: int,
    request: bytes,
    arrivals: Sequence[float],
    connections: int,
    *,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    load: Load | None = None,
) -> list[Sent]:
    """Sends a request at each of these times, whatever became of those before; what became of each, in the order of the ends.

    Args:
        connections: that are kept open; while all are in use, a request that is due waits for one, which its time includes.
        load: counts the requests too.

    Raises:
        OSError: a connection cannot be made.
    """
    found: list[Sent] = []
    idle: asyncio.Queue[_Streams] = asyncio.Queue()
    for _ in range(connections):
        idle.put_nowait(await asyncio.open_connection(host, port, ssl=tls))
    began = time.perf_counter()

    async def send(due: float) -> None:
        reader, writer = await idle.get()
        try:
            lag = time.perf_counter() - began - due
            status, body = await _exchange(reader, writer, request)
            found.append(Sent(status, time.perf_counter() - began - due, lag))
            if load is not None:
                load.count(status, body, found[-1].seconds)
            if not status:
                writer.close()
                reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        finally:
            idle.put_nowait((reader, writer))

    tasks = []
    for due in arrivals:
        wait = began + due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(send(due)))
    await asyncio.gather(*tasks)
    while not idle.empty():
        idle.get_nowait()[1].close()
    if load is not None:
        load.wall = time.perf_counter() - began
    return found


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head[9:12])
    if b"\r\ntransfer-encoding: chunked" in head:
        return status, await _read_chunks(reader)
    length = int(head.split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0])
    return status, await reader.readexactly(length)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while length := int(await reader.readuntil(b"\r\n"), 16):
        chunks.append((await reader.readexactly(length + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(chunks)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, bytes]:
    """Status and body of the answer; status 0: the connection ended instead."""
    try:
        writer.write(request)
        return await read_answer(reader)
    except (asyncio.IncompleteReadError, OSError):
        return 0, b""


def _described(x: npt.NDArray[Any]) -> dict[str, Any]:
    return {"name": "x", "shape": list(x.shape), "datatype": "INT32" if x.dtype.kind in "iu" else "FP32"}


def _code_of(status: int, body: bytes) -> str:
    """The code of a failure: the server's own, else the status."""
    if not status:
        return _LOST
    try:
        return str(json.loads(body)["code"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
