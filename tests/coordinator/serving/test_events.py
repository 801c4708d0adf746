"""Texts over HTTP as server-sent events: clients that vanish or do not read end the generation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.errors import Refusal
from coordinator.serving import front
from coordinator.serving.front import Front, Limits
from tests.support.memory_inference import BreakingInference, MemoryInference

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Exchange:
    """One request to the front, as an ASGI server passes it on; the client reads `reads` pieces of the answer."""

    def __init__(self, service: Any, path: str, body: Mapping[str, Any], reads: int = 1_000) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.vanishes = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self._reads = reads
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        self.answering = asyncio.ensure_future(Front(service, Limits())(scope, self._receive, self._send))

    async def _receive(self) -> Mapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self.vanishes.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: Mapping[str, Any]) -> None:
        if len(self.sent) > self._reads:
            await asyncio.Event().wait()
        self.sent.append(event)

    async def until_sent(self, count: int) -> None:
        while len(self.sent) < count:
            await asyncio.sleep(0)

    @property
    def text(self) -> str:
        return b"".join(each.get("body", b"") for each in self.sent).decode()


def completions(service: Any, **fields: Any) -> Exchange:
    reads = fields.pop("reads", 1_000)
    return Exchange(service, "/v1/completions", {"model": "plays", "prompt": "b", **fields}, reads)


async def test_events_end_with_done() -> None:
    exchange = completions(MemoryInference(), stream=True, max_tokens=2)
    await exchange.answering
    start, *_, end = exchange.sent
    assert (start["status"], dict(start["headers"])[b"content-type"]) == (200, b"text/event-stream")
    assert exchange.text.endswith("data: [DONE]\n\n") and not end.get("more_body")


async def test_vanished_client_ends_its_stream() -> None:
    service = BreakingInference()
    exchange = completions(service, stream=True, n=3)
    await exchange.until_sent(2)
    exchange.vanishes.set()
    await exchange.answering
    assert service.left == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_vanished_client_ends_the_text_it_waits_for(stream: bool) -> None:
    service = BreakingInference(begins=False)
    exchange = completions(service, stream=stream)
    await service.begun.wait()
    exchange.vanishes.set()
    await exchange.answering
    assert (service.left, exchange.sent) == (1, [])


async def test_client_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_UNREAD_SECONDS", 0.01)
    service = BreakingInference()
    exchange = completions(service, stream=True, reads=0)
    await exchange.answering
    assert service.left == 1


async def test_refusal_is_openais_error_object() -> None:
    service = MemoryInference()
    service.refusal = Refusal(429, "queue_full", "too many wait", retry_after_seconds=1)
    exchange = completions(service, stream=True)
    await exchange.answering
    assert exchange.sent[0]["status"] == 429
    assert dict(exchange.sent[0]["headers"])[b"retry-after"] == b"1"
    assert json.loads(exchange.text)["error"]["code"] == "queue_full"


async def test_body_that_is_no_json_object_is_refused_as_openai_does() -> None:
    exchange = Exchange(MemoryInference(), "/v1/completions", [])  # type: ignore[arg-type]
    await exchange.answering
    assert exchange.sent[0]["status"] == 400
    assert json.loads(exchange.text)["error"]["type"] == "invalid_request_error"
