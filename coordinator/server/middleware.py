"""Middleware of every request: the log and metrics, the check of its host name, and the limit of its body."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import Refusal
from coordinator.limits.request_bodies import read_body
from coordinator.option_parsers import is_ip_address
from coordinator.server.metrics import Metrics

_log = structlog.get_logger("fedloop.requests")


class RequestLogMiddleware:
    """Counts and logs each request by its route template: one line, no body, no header, no query.

    Unexpected exceptions end here: they are logged, and `failure` makes the response. Unless that is a 500, the
    cause is known and one line replaces the traceback.
    """

    def __init__(
        self, app: ASGIApp, *, api: str, metrics: Metrics, failure: Callable[[Exception], Response]
    ) -> None:
        self._app = app
        self._api = api
        self._metrics = metrics
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status, received, sent = 0, 0, 0

        async def count_received() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def count_sent(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, count_received, count_sent)
        except Exception as error:
            response = self._failure(error)
            context = {"api": self._api, "method": scope["method"], "path": scope["path"][:200]}
            if response.status_code == 500:
                _log.exception("request_failed", **context)
            else:
                _log.error("request_failed", reason=" ".join(str(error).split())[:500], **context)
            if status:
                raise  # half a response is sent; the server cuts the connection, so that nobody takes it for complete
            await response(scope, receive, count_sent)
        finally:
            seconds = time.monotonic() - began
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.request(self._api, route, status, seconds, received, sent)
            _log.info(
                "request",
                api=self._api,
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                seconds=round(seconds, 4),
                bytes_in=received,
                bytes_out=sent,
            )


class TrustedHostMiddleware:
    """Refuses requests addressed to a host name that is not ours.

    A web page can make a browser send requests to this machine under the page's own name (DNS rebinding), and then
    read the responses; the name in `Host` reveals that. The attack does not work with an address in its place.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _host_of(scope)
            if host not in self._allowed and not is_ip_address(host):
                refusal = _refusal(
                    421,
                    "wrong_host",
                    f"this coordinator does not answer to the name {host[:100]!r}; use its address, or start "
                    "`fedloop serve` with --name",
                )
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Reads a request's body completely, up to a limit, before anything uses it.

    `limit_of` returns the bytes and seconds that a request may take. With a limit of 0 the body is not read and counts as
    empty: a refusal needs none.
    """

    def __init__(self, app: ASGIApp, *, limit_of: Callable[[Request], Awaitable[tuple[int, float]]]) -> None:
        self._app = app
        self._limit_of = limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            limit_bytes, seconds = await self._limit_of(request)
            body = await read_body(request, limit_bytes, seconds) if limit_bytes else b""
        except ClientDisconnect:
            return
        except Refusal as refusal:
            await _refusal(refusal.status, refusal.code, str(refusal))(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)


def _refusal(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status)


def _host_of(scope: Scope) -> str:
    """The name or address of the `Host` header, without its port."""
    header = next((value for name, value in scope["headers"] if name == b"host"), b"")
    host = header.decode("latin1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
