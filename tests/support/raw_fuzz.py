"""Bytes for the ports of a coordinator: requests that went wrong somewhere, and what never was one.

`script` makes the pieces that one connection sends, from a seed; `played` sends them and gives what came back. The
client gives up after a silence, by closing or by a reset, as clients do.
"""

from __future__ import annotations

import random
import re
import select
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from tests.support.stranger import Port

SILENCE_SECONDS = 0.15
MAX_SECONDS = 30.0
THREADS = 24
_PATHS = (
    *("/", "*", "/device/v1/ca", "/device/v1/checkin", "/device/v1/enrol", "/device/v1/renew", "/metrics"),
    *("/device/v1/tasks/x/upload?offset=0", "/device/v1/blobs/" + "a" * 64, "/device/v1/releases/root.json"),
    *("/api/v1/devices", "/api/v1/tokens", "/api/v1/runs", "/api/v1/events", "/api/openapi.json"),
    *("http://localhost/api/v1/runs", "//", "/%00", "/\xff", "/..%2f..", "localhost:443", "?", "#", "/a b"),
)
_METHODS = ("GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PATCH", "PRI", "get", "")
_VERSIONS = (
    "HTTP/1.1",
    "HTTP/1.1",
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/2.0",
    "HTTP/0.9",
    "HTTP/9.9",
    "RTSP/1.0",
    "",
)
_HEADERS = (
    *(
        "host: localhost",
        "host:",
        "host: a\r\nhost: b",
        "host: [::1",
        "connection: close",
        "connection: keep-alive",
    ),
    *(
        "connection: upgrade\r\nupgrade: websocket",
        "connection: upgrade\r\nupgrade: h2c",
        "expect: 100-continue",
    ),
    *(
        "authorization: Bearer x",
        "authorization: Bearer",
        "authorization: \xff",
        "x-client-cert: %ff",
        "range: bytes=9-1",
    ),
    *(
        "content-type: application/json",
        "content-type: multipart/form-data; boundary=",
        "accept-encoding: gzip",
    ),
    *(
        "x-forwarded-for: 1.2.3.4",
        "x-forwarded-proto: \xff",
        " folded",
        "no colon",
        ": no name",
        "a\0b: c",
        "a: b\0c",
    ),
)
_LENGTHS = (
    "0",
    "1",
    "5",
    "-1",
    "+5",
    "5, 5",
    "5\r\ncontent-length: 6",
    "99999999999999999999",
    "0x10",
    " ",
    "1e3",
)
_CHUNKS = (
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
    b"5;a=b\r\nhello\r\n",
    b"-1\r\n",
    b"ffffffffffffffff\r\n",
    b"5\nhello\n",
    b"g\r\n",
)


def script(rng: random.Random) -> list[bytes]:
    """What one connection sends, piece by piece."""
    kind = rng.choice((_requests, _requests, _requests, _requests, _damaged, _damaged, _noise, _large))
    return _cut(rng, kind(rng))


def _requests(rng: random.Random) -> bytes:
    return b"".join(_request(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 30))))


def _request(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        lines = [f"{rng.choice(_METHODS[:4])} {rng.choice(_PATHS[2:15])} HTTP/1.1", "host: localhost"]
    else:
        lines = [" ".join((rng.choice(_METHODS), rng.choice(_PATHS), rng.choice(_VERSIONS)))]
        lines += rng.sample(_HEADERS, rng.choice((1, 2, 2, 3, 6)))
    body = rng.choice((b"", b"", b"{}", b"null", b"[" * 300, rng.randbytes(rng.randrange(200))))
    if rng.random() < 0.3:
        lines.append(
            "transfer-encoding: " + rng.choice(("chunked", "chunked", "gzip, chunked", "Chunked ", "x"))
        )
        body = b"".join(rng.choices(_CHUNKS, k=rng.randrange(5)))
    if rng.random() < 0.6:
        lines.append("content-length: " + rng.choice((str(len(body)), str(len(body)), rng.choice(_LENGTHS))))
    end = rng.choice(("\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r"))
    return end.join([*lines, "", ""]).encode("latin-1") + body


def _damaged(rng: random.Random) -> bytes:
    """Requests with bytes changed, dropped, doubled or moved."""
    content = bytearray(_requests(rng))
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, size = rng.randrange(len(content) + 1), rng.choice((1, 1, 4, 40))
        some = bytes(content[at : at + size])
        match rng.randrange(4):
            case 0:
                content[at : at + size] = rng.randbytes(len(some))
            case 1:
                del content[at : at + size]
            case 2:
                content[at:at] = some * rng.choice((1, 10, 100))
            case _:
                other = rng.randrange(len(content) + 1)
                content[other:other] = some
    return bytes(content)


def _noise(rng: random.Random) -> bytes:
    """No HTTP at all: random bytes, empty lines, TLS and HTTP/2 where they do not belong."""
    tls = b"\x16\x03\x01" + rng.randbytes(2) + b"\x01" + rng.randbytes(rng.randrange(500))
    return rng.choice(
        (
            rng.randbytes(rng.randrange(1, 2000)),
            b"\r\n" * rng.randrange(1, 5000),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(100),
            tls,
            b"\0" * rng.randrange(1, 40_000),
        )
    )


def _large(rng: random.Random) -> bytes:
    """About as much of something as is allowed, or more."""
    size = rng.choice((1000, 8_000, 8_192, 16_000, 16_384, 17_000, 100_000))
    line = rng.choice(
        (b"GET / HTTP/1.1\r\n", b"POST /device/v1/enrol HTTP/1.1\r\ntransfer-encoding: chunked\r\n")
    )
    return rng.choice(
        (
            b"GET /" + b"u" * size + b" HTTP/1.1\r\n\r\n",
            b"G" * size,
            line + b"x: " + b"v" * size + b"\r\n\r\n",
            line + b"n" * size + b": v\r\n\r\n",
            line + b"a: b\r\n" * (size // 6) + b"\r\n",
            line + b"\r\n2\r\n{}\r\n0\r\n" + b"a: b\r\n" * (size // 6) + b"\r\n",
            line + b"\r\n2;" + b"e" * size + b"\r\n{}\r\n0\r\n\r\n",
            line + b"\r\n" + b"1\r\nx\r\n" * (size // 6),
            b"GET /device/v1/ca HTTP/1.1\r\n\r\n" * (size // 30),
        )
    )


def _cut(rng: random.Random, content: bytes) -> list[bytes]:
    """In one piece, in a few, or one that ends too early."""
    if rng.random() < 0.15:
        content = content[: rng.randrange(len(content) + 1)]
    places = sorted(rng.randrange(len(content) + 1) for _ in range(rng.choice((0, 0, 1, 2, 5))))
    return [content[a:b] for a, b in zip([0, *places], [*places, len(content)], strict=True)]


@dataclass
class Found:
    """What connections came to. `statuses`: of all answers; `endings`: connections, by who ended them."""

    statuses: Counter[int] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)


def fuzzed(
    device: str, operator: str, seed: int, count: int, each: Callable[[], None] = lambda: None
) -> Found:
    """So many connections to both ports; one in ten speaks without TLS where TLS is spoken.

    Args:
        each: called now and then, in one thread.
    """
    ports = (Port(device), Port(operator), Port(device.replace("https", "http")))
    found = Found()
    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, count, 500):
            numbers = range(first, min(count, first + 500))
            for statuses, ending in pool.map(
                lambda at: _played(ports, random.Random(f"{seed}/{at}")), numbers
            ):
                found.statuses.update(statuses)
                found.endings[ending] += 1
            each()
    return found


def _played(ports: tuple[Port, Port, Port], rng: random.Random) -> tuple[list[int], str]:
    """Statuses that came, and who ended the connection."""
    (port,) = rng.choices(ports, (4, 5, 1))
    pieces = script(rng)
    answer, ending = bytearray(), "by us"
    try:
        with port.connected() as line:
            for piece in pieces:
                line.settimeout(5.0)
                line.sendall(piece)
            if port.url.startswith("http:") and rng.random() < 0.2:
                line.shutdown(socket.SHUT_WR)
            ending = _read(line, answer)
            if rng.random() < 0.2:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:  # a server may cut off whoever does not speak its language
        ending = "by reset"
    # A body may hold anything, so the start of a line alone is no answer.
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", bytes(answer))], ending


def _read(line: socket.socket, answer: bytearray) -> str:
    """Until the end, or a silence of ours."""
    end = time.monotonic() + MAX_SECONDS
    line.setblocking(False)
    while time.monotonic() < end:
        try:
            block = line.recv(65_536)
        except (ssl.SSLWantReadError, BlockingIOError):
            if not select.select([line], [], [], SILENCE_SECONDS)[0]:
                return "by us"
            continue
        if not block:
            return "by the server"
        answer += block
        if re.search(rb"connection: close\r\n", answer):
            with suppress(OSError):
                answer += line.recv(65_536)
            return "by agreement"
    return "never"
