"""Request bodies that are read into memory, with limits on size and time; those of devices as messages of the wire."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import Request

from coordinator.errors import Refusal
from edge_client.wire.strict import InvalidDocument, loads, parse_message, require_bounded

LIMIT_BYTES = 2**17
ANONYMOUS_LIMIT_BYTES = 16 * 1024
"""For a message without a client certificate: a token or a certificate, a CSR, a proof and a name come to 4 KB."""
ANONYMOUS_SECONDS = 20.0
"""Time for such a message to arrive."""
BODY_SECONDS = 60.0
"""For the entire body, so that sending a byte now and then does not keep a connection open for ever."""

T = TypeVar("T")


async def read_body(request: Request, limit_bytes: int, seconds: float = BODY_SECONDS) -> bytes:
    """The body, of at most `limit_bytes`, if it arrives within `seconds`.

    Raises:
        Refusal: 413 `oversized`, before anything is read if the request declares its size; 408 `too_slow`.
        ClientDisconnect: the connection ended first.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _oversized(limit_bytes)
    try:
        async with asyncio.timeout(seconds):
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise _oversized(limit_bytes)
            return bytes(body)
    except TimeoutError:
        raise Refusal(408, "too_slow", f"this body did not arrive within {seconds:.0f} s") from None


def _oversized(limit_bytes: int) -> Refusal:
    return Refusal(413, "oversized", f"a body here has at most {limit_bytes} bytes")


async def read_message(kind: type[T], request: Request) -> T:
    """The body as a message of this kind.

    Raises:
        Refusal: 413 `oversized`, before more is read; 408 `too_slow`; 422 `malformed`.
    """
    return _parse(kind, await read_body(request, LIMIT_BYTES))


async def read_anonymous_message(kind: type[T], request: Request) -> T:
    """The same from a sender without a client certificate, within narrower limits."""
    return _parse(kind, await read_body(request, ANONYMOUS_LIMIT_BYTES, ANONYMOUS_SECONDS))


def _parse(kind: type[T], body: bytes) -> T:
    try:
        name = kind.__name__
        return require_bounded(parse_message(kind, loads(body, name), name), name)
    except InvalidDocument as error:
        raise Refusal(422, "malformed", str(error)) from None
