"""Many devices that upload at the same moment, each on a connection of its own, and what that costs a coordinator."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from edge_client.wire import device as wire
from tests.support.arena import Arena, experiment, memory_of
from tests.support.device_client import RawDevice, message, request

FEATURES = 340_000
"""Of a logreg of three classes: an update of 4.1 MB."""
_AGAIN_SECONDS = 0.2
_WATCH_SECONDS = 0.02


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Storm:
    """What came of it. `honest`: seconds of each check-in of a device that uploads nothing."""

    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    retry_after: set[str] = field(default_factory=set)
    accepted_bytes: int = 0
    rest_bytes: int = 0
    peak_bytes: int = 0
    honest: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.rest_bytes

    def honest_p99(self) -> float:
        return sorted(self.honest)[int(0.99 * (len(self.honest) - 1))]


def announced(made: Arena, uploaders: Sequence[RawDevice]) -> dict[str, str]:
    """Device -> task of a run in which each has announced a large update of zeros."""
    document = experiment(len(uploaders))
    document["data"] |= {"input_shape": [FEATURES]}
    made.fleet.client.post("/runs", {"experiment": document})
    tasks = {}
    for device in uploaders:
        assert device.check_in(made.checkin()).status == 200
    for device in uploaders:
        tasks[device.id] = device.task(made.checkin())["task"]
        assert device.announce(tasks[device.id], CONTENT).status == 200
        device.close()
    return tasks


CONTENT = bytes(4 * FEATURES * 3)


def storm(
    made: Arena, uploaders: Sequence[RawDevice], honest: RawDevice, seconds: float, *, kept: bool = False
) -> Storm:
    """All devices send everything at once, again and again where they are told to come back, for so long at most.

    Each piece comes on a connection of its own; `kept`: the first one on a connection that was open before.
    """
    tasks = announced(made, uploaders)
    found = Storm()
    for _ in range(50):  # all code is loaded, all caches are filled
        honest.check_in(made.checkin())
    found.rest_bytes = memory_of(made.fleet.coordinator.pid).resident
    asyncio.run(_storm(made, uploaders, tasks, honest, seconds, found, kept))
    return found


async def _storm(
    made: Arena,
    uploaders: Sequence[RawDevice],
    tasks: dict[str, str],
    honest: RawDevice,
    seconds: float,
    found: Storm,
    kept: bool,
) -> None:
    lines: list[Line | None] = [None] * len(uploaders)
    if kept:
        lines = [await _at_rest(device, tasks[device.id]) for device in uploaders]
        found.rest_bytes = memory_of(made.fleet.coordinator.pid).resident
    began = time.monotonic()
    watching = [
        asyncio.create_task(_watch(made.fleet.coordinator.pid, found)),
        asyncio.create_task(_honest(made, honest, found)),
    ]
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(
                *(
                    _upload(device, tasks[device.id], found, line)
                    for device, line in zip(uploaders, lines, strict=True)
                )
            )
    found.seconds = time.monotonic() - began
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


async def _watch(pid: int, found: Storm) -> None:
    while True:
        found.peak_bytes = max(found.peak_bytes, memory_of(pid).resident)
        await asyncio.sleep(_WATCH_SECONDS)


async def _honest(made: Arena, device: RawDevice, found: Storm) -> None:
    while True:
        began = time.perf_counter()
        answer = await asyncio.to_thread(device.check_in, made.checkin())
        assert answer.status == 200, answer
        found.honest.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)


async def _at_rest(device: RawDevice, task: str) -> Line:
    """A connection on which a request was answered."""
    line = await _connected(device)
    announcement = wire.UploadStart(len(CONTENT), _SHA256, len(CONTENT))
    line[1].write(request("POST", f"/tasks/{task}/upload", message(announcement)))
    assert (await _answer(line[0]))[0] == 200
    return line


async def _upload(device: RawDevice, task: str, found: Storm, line: Line | None) -> None:
    """Sends what is missing until all of it has come, and was judged."""
    offset = 0
    while offset < len(CONTENT):
        status, headers, body = await _piece(device, task, offset, line)
        line = None
        found.statuses[status] += 1
        if status == 200:
            offset = json.loads(body)["offset"]
            continue
        error = json.loads(body)["error"] if body else {"code": "no answer"}
        found.codes[error["code"]] += 1
        if status == 422:
            break  # zeros without a header: all came, and that is what it was
        if "retry-after" in headers:
            found.retry_after.add(headers["retry-after"])
        offset = await _offset(device, task)
        await asyncio.sleep(_AGAIN_SECONDS)
    found.accepted_bytes += len(CONTENT)


async def _offset(device: RawDevice, task: str) -> int:
    announcement = wire.UploadStart(len(CONTENT), _SHA256, len(CONTENT))
    status, _, body = await _requested(
        device, request("POST", f"/tasks/{task}/upload", message(announcement))
    )
    return int(json.loads(body)["offset"]) if status == 200 else 0


_SHA256 = hashlib.sha256(CONTENT).hexdigest()


async def _piece(
    device: RawDevice, task: str, offset: int, line: Line | None
) -> tuple[int, dict[str, str], bytes]:
    head = request("PUT", f"/tasks/{task}/upload?offset={offset}", b"", length=str(len(CONTENT) - offset))
    return await _requested(device, head, memoryview(CONTENT)[offset:], line)


async def _connected(device: RawDevice) -> Line:
    parts = urlsplit(device.url)
    context: ssl.SSLContext = device.line.context
    return await asyncio.open_connection(
        parts.hostname, parts.port, ssl=context, server_hostname=parts.hostname
    )


async def _requested(
    device: RawDevice, head: bytes, content: memoryview | None = None, line: Line | None = None
) -> tuple[int, dict[str, str], bytes]:
    try:
        reader, writer = line or await _connected(device)
    except OSError:
        return 0, {}, b""
    try:
        writer.write(head)
        answer = asyncio.create_task(_answer(reader))
        with suppress(OSError):
            for at in range(0, len(content or b""), 2**16):
                if answer.done():
                    break
                assert content is not None
                writer.write(content[at : at + 2**16])
                await writer.drain()
        return await answer
    except (OSError, asyncio.IncompleteReadError):
        return 0, {}, b""
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {key.lower(): value for key, _, value in (each.partition(": ") for each in lines[1:] if each)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return int(lines[0].split()[1]), headers, body
