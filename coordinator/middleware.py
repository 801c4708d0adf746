"""What every request passes on its way in: who it is addressed to, how much it may bring, and the record of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from ipaddress import ip_address

import structlog
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.metrics import Metrics

_log = structlog.get_logger("fedloop.requests")


class Observed:
    """Counts and logs each request by its route template: one line, no body, no header, no query.

    What nobody foresaw ends here: it is logged, and answered with what `failure` makes of it.
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

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        except Exception as error:
            _log.exception("request_failed", api=self._api, method=scope["method"], path=scope["path"][:200])
            if status:
                raise  # half an answer is out; the server cuts the connection, so that nobody takes it for whole
            await self._failure(error)(scope, receive, counted_send)
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


class OnlyHosts:
    """Refuses requests addressed to a name that is not ours.

    A web page can make a browser send requests to this machine under the page's own name (DNS rebinding), and then
    read the answers; the name in `Host` gives it away. An address in its place cannot be had that way.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _host_of(scope)
            if host not in self._allowed and not _is_address(host):
                refusal = _refusal(
                    421,
                    "wrong_host",
                    f"this coordinator does not answer to the name {host[:100]!r}; use its address, or start "
                    "`fedloop serve` with --name",
                )
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LimitedBodies:
    """Takes in a request's body whole, up to a limit, before anything looks at it."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int) -> None:
        self._app = app
        self._limit = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                refusal = _refusal(413, "oversized", f"a body here has at most {self._limit} bytes")
                await refusal(scope, receive, send)
                return
        waiting: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replayed, send)


def _refusal(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status)


def _host_of(scope: Scope) -> str:
    """The name or address of the `Host` header, without its port."""
    given = next((value for name, value in scope["headers"] if name == b"host"), b"")
    host = given.decode("latin1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
