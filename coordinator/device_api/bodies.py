"""Bodies of the device API: JSON objects of limited size, parsed as the wire's own messages."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request

from coordinator.errors import Refusal
from edge_client.wire.strict import Unfit, loads, parse_message

LIMIT_BYTES = 2**20
BODY_SECONDS = 60.0
"""For a whole message to come. A byte now and then keeps no connection open for ever."""

T = TypeVar("T")


async def message_of(kind: type[T], request: Request) -> T:
    """The body as a message of this kind.

    Raises:
        Refusal: 413 `oversized`, before more is read; 408 `too_slow`; 422 `malformed`.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _whole(request)
        return parse_message(kind, loads(body, kind.__name__), kind.__name__)
    except TimeoutError:
        raise Refusal(408, "too_slow", f"this message had not come after {BODY_SECONDS:.0f} s") from None
    except Unfit as error:
        raise Refusal(422, "malformed", str(error)) from None


async def _whole(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LIMIT_BYTES:
            raise Refusal(413, "oversized", f"a message here has at most {LIMIT_BYTES} bytes")
    return bytes(body)
