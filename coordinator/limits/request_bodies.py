"""Request bodies that are read into memory, with limits on size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from coordinator.errors import Refusal

BODY_SECONDS = 60.0
"""For the entire body, so that sending a byte now and then does not keep a connection open for ever."""


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
