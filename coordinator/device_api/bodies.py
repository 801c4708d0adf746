"""Request bodies of the device API: JSON objects of limited size, parsed as messages of the wire."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request

from coordinator.errors import Refusal
from coordinator.limits.request_bodies import read_body
from edge_client.wire.strict import InvalidDocument, loads, parse_message, require_bounded

LIMIT_BYTES = 2**17
ANONYMOUS_LIMIT_BYTES = 16 * 1024
"""For a message without a client certificate: a token or a certificate, a CSR, a proof and a name come to 4 KB."""
ANONYMOUS_SECONDS = 20.0
"""Time for such a message to arrive."""

T = TypeVar("T")


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
