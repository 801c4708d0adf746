"""Load on a server of inference: requests over many connections that are kept open, and what became of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class Load:
    """What became of requests: `answers` by status; `seconds` of those with 200, in the order of their ends."""

    statuses: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    wall: float = 0.0
    """Seconds that all of it took."""
    lost: int = 0
    """Connections that ended without an answer."""
    bodies: list[tuple[int, bytes]] = field(default_factory=list)
    """Number of the request and its answer, if they are kept."""

    @property
    def failed(self) -> int:
        return self.lost + sum(count for status, count in self.statuses.items() if status != 200)


def json_request(
    path: str, x: npt.NDArray[Any], outputs: Sequence[str] = ("logits",), **parameters: Any
) -> bytes:
    """A whole HTTP request in JSON for rows `x` as FP32."""
    body = {
        "inputs": [{"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}],
        "outputs": [{"name": name} for name in outputs],
        "parameters": parameters,
    }
    return http_request(path, json.dumps(body).encode())


def binary_request(
    path: str, x: npt.NDArray[Any], outputs: Sequence[str] = ("logits",), **parameters: Any
) -> bytes:
    """A whole HTTP request with binary tensors, for the request and for the answer."""
    content = x.astype(np.float32).tobytes()
    document = {
        "inputs": [
            {
                "name": "x",
                "shape": list(x.shape),
                "datatype": "FP32",
                "parameters": {"binary_data_size": len(content)},
            }
        ],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        "parameters": parameters,
    }
    head = json.dumps(document).encode()
    return http_request(path, head + content, f"Inference-Header-Content-Length: {len(head)}\r\n")


def http_request(path: str, body: bytes, headers: str = "") -> bytes:
    """A POST as bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def closed_loop(
    port: int,
    requests: Sequence[bytes],
    connections: int,
    *,
    total: int | None = None,
    until: Callable[[], bool] | None = None,
    keeps: bool = False,
) -> Load:
    """Each connection sends its next request once it has the answer: `total` requests in all, or `until` is true."""
    load = Load()
    sent, start = 0, time.perf_counter()

    async def run() -> None:
        nonlocal sent
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while (total is None or sent < total) and not (until is not None and until()):
                number, sent = sent, sent + 1
                began = time.perf_counter()
                writer.write(requests[number % len(requests)])
                try:
                    status, body = await read_answer(reader)
                except (asyncio.IncompleteReadError, OSError):
                    load.lost += 1
                    return
                load.statuses[status] = load.statuses.get(status, 0) + 1
                if status == 200:
                    load.seconds.append(time.perf_counter() - began)
                if keeps:
                    load.bodies.append((number, body))
        finally:
            writer.close()

    await asyncio.gather(*(run() for _ in range(connections)))
    load.wall = time.perf_counter() - start
    return load


@dataclass(frozen=True)
class Sent:
    """A request of an open loop. `seconds`: until its answer, from when it was due; `lag`: until it was sent, from then."""

    status: int
    seconds: float
    lag: float


async def open_loop(port: int, request: bytes, arrivals: Sequence[float], connections: int) -> list[Sent]:
    """Sends a request at each of these times, whatever became of those before. `connections`: that are kept open at most."""
    found: list[Sent] = []
    idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    for _ in range(connections):
        idle.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    began = time.perf_counter()

    async def send(due: float) -> None:
        reader, writer = await idle.get()
        writer.write(request)
        lag = time.perf_counter() - began - due
        status, _ = await read_answer(reader)
        found.append(Sent(status, time.perf_counter() - began - due, lag))
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
