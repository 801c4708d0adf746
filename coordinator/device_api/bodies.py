"""Bodies of the device API: JSON objects of limited size, parsed as the wire's own messages."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request

from coordinator.errors import Refusal
from edge_client.wire.strict import Unfit, loads, parse_message

LIMIT_BYTES = 2**20

T = TypeVar("T")


async def message_of(kind: type[T], request: Request) -> T:
    """The body as a message of this kind.

    Raises:
        Refusal: 413 `oversized`, before more is read; 422 `malformed`.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LIMIT_BYTES:
            raise Refusal(413, "oversized", f"a message here has at most {LIMIT_BYTES} bytes")
    try:
        return parse_message(kind, loads(bytes(body), kind.__name__), kind.__name__)
    except Unfit as error:
        raise Refusal(422, "malformed", str(error)) from None
