"""Limits of a request head, the handling of trailers, and when a connection ends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from coordinator.server.http_protocol import (
    HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    URL_BYTES,
)
from tests.support.doorway import listening
from tests.support.stranger import read_answer


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Describes the request; `/early` answers before it reads a body."""
    request = Request(scope, receive)
    body = b"" if request.url.path == "/early" else await request.body()
    received = {"path": request.url.path, "headers": dict(request.headers), "body": body.decode()}
    await JSONResponse(received)(scope, receive, send)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening(echo) as found:
        yield found


def answered(port: int, content: bytes) -> tuple[int, dict[str, Any]]:
    """Status and document of the first response."""
    with socket.create_connection(("127.0.0.1", port), 30) as line:
        line.sendall(content)
        answer, _ = read_answer(line, time.monotonic() + 30)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), json.loads(body)


def head(lines: list[str], url: str = "/") -> bytes:
    return "\r\n".join([f"GET {url} HTTP/1.1", "connection: close", *lines, "", ""]).encode()


@pytest.mark.parametrize(("count", "status"), [(MAX_HEADERS - 1, 200), (MAX_HEADERS, 431)])
def test_the_number_of_headers_is_limited(port: int, count: int, status: int) -> None:
    assert answered(port, head([f"x-{at}: 1" for at in range(count)]))[0] == status


@pytest.mark.parametrize(("size", "status"), [(URL_BYTES, 200), (URL_BYTES + 1, 414)])
def test_the_size_of_a_url_is_limited(port: int, size: int, status: int) -> None:
    assert answered(port, head([], "/" + "u" * (size - 1)))[0] == status


@pytest.mark.parametrize(("size", "status"), [(HEAD_BYTES, 200), (HEAD_BYTES + 1, 431)])
def test_the_size_of_a_head_is_limited_however_it_is_split(port: int, size: int, status: int) -> None:
    content = head(["x-long: " + "v" * (size - len(head(["x-long: "])))])
    assert len(content) == size
    assert answered(port, content)[0] == status
    with socket.create_connection(("127.0.0.1", port), 30) as line:
        for at in range(0, len(content), 1000):
            line.sendall(content[at : at + 1000])
        answer, is_closed = read_answer(line, time.monotonic() + 30)
    assert is_closed and int(answer.split(b" ", 2)[1]) == status


def test_a_refusal_has_the_error_format(port: int) -> None:
    status, document = answered(port, b"GET / NONSENSE\r\n\r\n")
    assert (status, document["error"]["code"]) == (400, "malformed")
    _, document = answered(port, head([f"x-{at}: 1" for at in range(MAX_HEADERS)]))
    assert document["error"] == {
        "code": "headers_too_large",
        "message": f"there are more than {MAX_HEADERS} headers",
    }


def test_a_trailer_is_not_a_header(port: int) -> None:
    """A proxy that replaces `X-Client-Cert` looks at headers only."""
    start = b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    status, document = answered(port, start + b"2\r\nhi\r\n0\r\nx-client-cert: mine\r\n\r\n")
    assert (status, document["body"]) == (200, "hi")
    assert "x-client-cert" not in document["headers"]


def test_the_framing_of_small_chunks_does_not_count_as_excess(port: int) -> None:
    start = b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    status, document = answered(port, start + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
    assert (status, len(document["body"])) == (200, 20_000)


def test_a_few_pipelined_requests_are_allowed(port: int) -> None:
    request = b"GET /one HTTP/1.1\r\n\r\n"
    last = head([], "/last")
    with socket.create_connection(("127.0.0.1", port), 30) as line:
        line.sendall(request * MAX_PIPELINED + last)
        answer, is_closed = read_answer(line, time.monotonic() + 30)
    assert is_closed
    assert answer.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
    assert answer.index(b"/one") < answer.index(b"/last")
