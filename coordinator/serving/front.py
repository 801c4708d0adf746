"""The HTTP front: a raw ASGI application of the REST protocols, the management of deployments and `/metrics`.

    /v2/…                       Open Inference Protocol, with Triton's read-only extensions
    /v1/…                       OpenAI's completions and models
    /fedloop/v1/deployments/…   deploy, undeploy, scale, status; needs the management token
    /metrics                    for Prometheus

Every refusal is `{"error": MESSAGE, "code": CODE}`; under `/v1/` it is OpenAI's error object.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import structlog

from coordinator.errors import Refusal, UserError
from coordinator.serving import rest, triton
from coordinator.serving.deployments import NAME, parse
from coordinator.serving.inference import invalid
from coordinator.serving.metrics import encode_metrics
from coordinator.serving.openai_api import answers

if TYPE_CHECKING:
    from coordinator.serving.service import Serving

_log = structlog.get_logger("fedloop.serving")

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

MANAGEMENT = "/fedloop/v1/"
OPENAI = "/v1/"
_JSON = b"application/json"
_COMPRESSED_BYTES = 4096
"""Answers of at least so many bytes are compressed for clients that take it."""
_UNREAD_SECONDS = 60.0
"""A client that reads nothing of its events for so long is left."""
_T = TypeVar("_T")


class Disconnected(Exception):
    """The client has gone before its request was complete."""


@dataclass(frozen=True)
class Limits:
    """`body_bytes`: of a request, also after decompression. `token`: that requests for predictions need, or empty."""

    body_bytes: int = 64 * 2**20
    token: str = ""
    management_token: str = ""


@dataclass(frozen=True)
class _Response:
    body: bytes
    status: int = 200
    content_type: bytes = _JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Front:
    """The application."""

    def __init__(self, serving: Serving, limits: Limits) -> None:
        self._serving = serving
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        try:
            response = await self._answer(scope, headers, receive)
        except Refusal as refusal:
            response = _refuse(refusal, scope["path"])
        except UserError as error:
            response = _refuse(Refusal(400, error.code or "refused", str(error)), scope["path"])
        except Disconnected:
            return
        except Exception:
            _log.exception("request_failed", method=scope["method"], path=scope["path"][:200])
            failure = Refusal(500, "internal", "the server failed; its log says why")
            response = _refuse(failure, scope["path"])
        if isinstance(response, answers.Events):
            await _send_events(response, receive, send)
        else:
            await _send(response, headers, send)

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> _Response | answers.Events:
        method, path = scope["method"], scope["path"]
        parts = path.strip("/").split("/")
        is_management = path.startswith(MANAGEMENT)
        if not (path.startswith("/v2/health/") or path == "/v2"):
            limits = self._limits
            _require_token(headers, limits.management_token if is_management else limits.token)
        match method, parts:
            case "POST", ["v2", "models", model, "infer"]:
                return await self._infer(model, "", headers, receive)
            case "POST", ["v2", "models", model, "versions", version, "infer"]:
                return await self._infer(model, version, headers, receive)
            case "GET", ["v2", *rest_of_path]:
                return self._read(rest_of_path)
            case "POST", ["v2", "repository", "index"]:
                return await self._index(headers, receive)
            case "POST", ["v1", "completions"]:
                return await self._complete(headers, receive)
            case "GET", ["v1", "models"]:
                return _Response(await answers.models(self._serving))
            case "GET", ["v1", "models", model]:
                return _Response(await answers.model(self._serving, model))
            case "GET", ["metrics"]:
                return _Response(
                    encode_metrics(self._serving.manager.status()), content_type=b"text/plain; version=0.0.4"
                )
            case _, ["fedloop", "v1", *rest_of_path]:
                return await self._manage(method, rest_of_path, headers, receive)
        raise _unknown_path(method, path)

    async def _infer(
        self, model: str, version: str, headers: Mapping[bytes, bytes], receive: Receive
    ) -> _Response:
        body = await read_body(headers, receive, self._limits.body_bytes)
        length = _header_length(headers, len(body))
        request, wanted = rest.parse_request(body, length, model, version)
        answer = await self._serving.infer(request)
        content, head = rest.encode_answer(answer, wanted)
        if head is None:
            return _Response(content)
        return _Response(
            content, 200, b"application/octet-stream", ((rest.HEADER_LENGTH, str(head).encode()),)
        )

    def _read(self, path: list[str]) -> _Response:
        serving = self._serving
        match path:
            case []:
                return _json(triton.server_metadata())
            case ["health", "live"]:
                return _json({"live": True})
            case ["health", "ready"]:
                return _json({"ready": serving.is_ready}, 200 if serving.is_ready else 503)
            case ["models", "stats"]:
                return _json(triton.statistics(serving))
            case ["models", model, "stats"] | ["models", model, "versions", _, "stats"]:
                return _json(triton.statistics(serving, model, _version_of(path)))
            case ["models", model, "config"] | ["models", model, "versions", _, "config"]:
                return _json(triton.config(serving.describe(model, _version_of(path))))
            case ["models", model] | ["models", model, "versions", _]:
                return _json(triton.model_metadata(serving.describe(model, _version_of(path))))
            case ["models", model, "ready"] | ["models", model, "versions", _, "ready"]:
                ready = serving.describe(model, _version_of(path)).is_ready
                return _json({"name": model, "ready": ready})
        raise _unknown_path("GET", "/".join(("/v2", *path)))

    async def _index(self, headers: Mapping[bytes, bytes], receive: Receive) -> _Response:
        body = await read_body(headers, receive, self._limits.body_bytes)
        only_ready = rest.parse_json(body).get("ready", False) if body else False
        if not isinstance(only_ready, bool):
            raise invalid("bad_parameter", f"ready is {only_ready!r:.100}, expected true or false")
        return _json(triton.index(self._serving, only_ready=only_ready))

    async def _complete(self, headers: Mapping[bytes, bytes], receive: Receive) -> _Response | answers.Events:
        body = rest.parse_json(await read_body(headers, receive, self._limits.body_bytes))
        answer = await _unless_disconnected(receive, answers.completions(self._serving, body))
        return _Response(answer) if isinstance(answer, bytes) else answer

    async def _manage(
        self, method: str, path: list[str], headers: Mapping[bytes, bytes], receive: Receive
    ) -> _Response:
        serving = self._serving
        body = await read_body(headers, receive, self._limits.body_bytes)
        match method, path:
            case "GET", ["deployments"]:
                memory = serving.manager.memory
                used = {"used_bytes": memory.used_bytes, "limit_bytes": memory.limit_bytes}
                return _json(
                    {
                        "deployments": serving.manager.status(),
                        **({"memory": used} if memory.limit_bytes else {}),
                    }
                )
            case "PUT", ["deployments", name]:
                if not NAME.fullmatch(name):
                    raise invalid("bad_name", f"{name[:100]!r} is no name of a deployment")
                section = parse({"deployment": {name: rest.parse_json(body)}}, "deployment")[name]
                return _json(await serving.manager.deploy(name, section))
            case "DELETE", ["deployments", name]:
                await serving.manager.undeploy(name)
                return _json({})
            case "POST", ["deployments", name, "scale"]:
                given = rest.parse_json(body)
                return _json(serving.manager.scale(name, _count(given, "min", 0), _count(given, "max", 1)))
        raise _unknown_path(method, "/".join(path))


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """The body, decompressed.

    Raises:
        Refusal: 413 `body_too_large`, also after decompression; 400 `malformed`; 415 `unknown_encoding`.
        Disconnected: the client has gone.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Disconnected
        part = event.get("body", b"")
        size += len(part)
        if size > limit:
            raise Refusal(413, "body_too_large", f"the body has more than {limit} bytes", closes=True)
        parts.append(part)
        if not event.get("more_body"):
            break
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = headers.get(b"content-encoding", b"").strip().lower()
    if encoding in (b"", b"identity"):
        return body
    if encoding not in (b"gzip", b"deflate"):
        raise Refusal(
            415, "unknown_encoding", f"Content-Encoding is {encoding[:50]!r}, expected gzip or deflate"
        )
    try:
        reader = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
        plain = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid("malformed", f"the body is not {encoding.decode()}: {error}") from None
    if len(plain) > limit:
        raise Refusal(413, "body_too_large", f"the body has more than {limit} bytes when it is decompressed")
    if not reader.eof:
        raise invalid("malformed", f"the body is {encoding.decode()} that ends too early")
    return plain


async def _send(response: _Response, headers: Mapping[bytes, bytes], send: Send) -> None:
    body = response.body
    named = [(b"content-type", response.content_type), *response.headers]
    if len(body) >= _COMPRESSED_BYTES and (encoding := _accepted(headers.get(b"accept-encoding", b""))):
        body = _compress(body, encoding)
        named.append((b"content-encoding", encoding))
    named.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": named})
    await send({"type": "http.response.body", "body": body})


async def _send_events(events: answers.Events, receive: Receive, send: Send) -> None:
    """Until they end, or the client is gone or has read nothing for a while."""
    named = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]

    async def send_all() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": named})
        async for event in events:
            async with asyncio.timeout(_UNREAD_SECONDS):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    try:
        with suppress(Disconnected, TimeoutError):
            await _unless_disconnected(receive, send_all())
    finally:
        await events.aclose()


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns. Raises: Disconnected: the client has gone; the work is cancelled then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for each in (working, gone):
            each.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def _accepted(header: bytes) -> bytes:
    """The encoding of an answer: gzip, deflate or none."""
    offered = {part.strip().lower() for part in header.split(b",")}
    return next((each for each in (b"gzip", b"deflate") if each in offered), b"")


def _compress(body: bytes, encoding: bytes) -> bytes:
    writer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS | (16 if encoding == b"gzip" else 0))
    return writer.compress(body) + writer.flush()


def _json(document: Any, status: int = 200) -> _Response:
    return _Response(orjson.dumps(document), status)


def _refuse(refusal: Refusal, path: str) -> _Response:
    headers: list[tuple[bytes, bytes]] = []
    if refusal.retry_after_seconds is not None:
        headers.append((b"retry-after", str(max(1, round(refusal.retry_after_seconds))).encode()))
    if refusal.closes:
        headers.append((b"connection", b"close"))
    if path.startswith(OPENAI):
        body = answers.encode_refusal(refusal)
    else:
        body = json.dumps({"error": str(refusal), "code": refusal.code, **refusal.details}).encode()
    return _Response(body, refusal.status, _JSON, tuple(headers))


def _require_token(headers: Mapping[bytes, bytes], token: str) -> None:
    if not token:
        return
    given = headers.get(b"authorization", b"")
    if not hmac.compare_digest(given, b"Bearer " + token.encode()):
        code = "no_token" if not given else "bad_token"
        raise Refusal(401, code, "send the token of this server: Authorization: Bearer …")


def _header_length(headers: Mapping[bytes, bytes], size: int) -> int | None:
    value = headers.get(rest.HEADER_LENGTH)
    if value is None:
        return None
    if not value.isdigit() or not 0 < int(value) <= size:
        raise invalid(
            "wrong_size",
            f"Inference-Header-Content-Length is {value[:50]!r}, expected a number of bytes up to the body's {size}",
        )
    return int(value)


def _version_of(path: list[str]) -> str:
    return path[3] if len(path) > 3 and path[2] == "versions" else ""


def _count(given: Mapping[str, Any], key: str, least: int) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= 256:
        raise invalid(
            "bad_parameter", f"{key} is {value!r:.100}, expected a whole number from {least} to 256"
        )
    return int(value)


def _unknown_path(method: str, path: str) -> Refusal:
    return Refusal(404, "unknown_path", f"there is no {method} {path[:200]}")
