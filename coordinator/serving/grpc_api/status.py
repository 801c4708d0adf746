"""Statuses of gRPC for refusals of the service."""

from __future__ import annotations

import math

import grpc

from coordinator.errors import Refusal

CODE = "error-code"
"""Trailing metadata: the stable code of a refusal."""

RETRY = "retry-after"
"""Trailing metadata: after how many seconds to repeat a request."""

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

# Status and metadata share the 8 KB of headers that clients take by default; names of models come from the request.
_MAX_DETAILS = 1_000


async def abort(context: grpc.aio.ServicerContext, refusal: Refusal) -> None:
    """Ends a call with a refusal's status. It does not return."""
    await context.abort(status_of(refusal), details_of(refusal), trailing_metadata=metadata_of(refusal))


def status_of(refusal: Refusal) -> grpc.StatusCode:
    other = grpc.StatusCode.INTERNAL if refusal.status >= 500 else grpc.StatusCode.INVALID_ARGUMENT
    return _STATUS.get(refusal.status, other)


def details_of(refusal: Refusal) -> str:
    message = str(refusal)
    return message if len(message) <= _MAX_DETAILS else message[:_MAX_DETAILS] + "…"


def metadata_of(refusal: Refusal) -> tuple[tuple[str, str], ...]:
    if refusal.retry_after_seconds is None:
        return ((CODE, refusal.code),)
    return ((CODE, refusal.code), (RETRY, str(math.ceil(refusal.retry_after_seconds))))
