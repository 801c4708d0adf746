"""Bodies of the device API: JSON objects of limited size, parsed as the wire's own messages."""

from __future__ import annotations

import json
from typing import TypeVar

from fastapi import Request

from coordinator.errors import Refusal
from edge_client.wire.strict import Unfit, parse_message

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
        return parse_message(kind, json.loads(bytes(body)), kind.__name__)
    except Unfit as error:
        raise Refusal(422, "malformed", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Refusal(422, "malformed", f"{kind.__name__} is not JSON: {error}"[:300]) from None
