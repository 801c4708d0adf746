"""Answers to OpenAI's requests for completions and models: JSON, or server-sent events.

Several prompts, `n` and `best_of` are so many requests of the service, which computes them together; with a `seed`, the
choices of one prompt have consecutive seeds.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from coordinator.errors import Refusal
from coordinator.serving.inference import GeneratedText, InferenceService
from coordinator.serving.openai_api.fields import Completion, parse
from coordinator.serving.openai_api.texts import Text, finished, pieces

_DONE = b"data: [DONE]\n\n"


class Events:
    """Server-sent events, of which the first is there already. `aclose` ends the generation of the texts."""

    def __init__(self, first: bytes, following: AsyncGenerator[bytes, None]) -> None:
        self._first: bytes | None = first
        self._following = following

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._first is None:
            return await anext(self._following)
        first, self._first = self._first, None
        return first

    async def aclose(self) -> None:
        await self._following.aclose()


async def completions(
    service: InferenceService, body: Mapping[str, Any], *, clock: Callable[[], float] = time.time
) -> bytes | Events:
    """The answer to POST /v1/completions: JSON, or events with `stream`.

    Raises:
        Refusal: 400 with `param`, the field that is wrong; and what the service raises before the first piece of a text.
    """
    asked = parse(body)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(clock()),
        "model": asked.template.model,
    }
    if not asked.stream:
        return _whole(asked, head, await finished(service, asked.requests()))
    events = _events(service, asked, head)
    return Events(await anext(events), events)


async def models(service: InferenceService) -> bytes:
    """The answer to GET /v1/models: those that generate texts and answer now."""
    names = []
    for name in service.names():
        try:
            if service.describe(name).generates:
                names.append(name)
        except Refusal:  # it is not ready
            continue
    return orjson.dumps({"object": "list", "data": [_model(name) for name in names]})


async def model(service: InferenceService, name: str) -> bytes:
    """The answer to GET /v1/models/NAME. Raises: Refusal: as `InferenceService.describe`; 404: it generates no texts."""
    if not service.describe(name).generates:
        raise Refusal(404, "unknown_model", f"{name[:100]!r} does not generate text", param="model")
    return orjson.dumps(_model(name))


def encode_refusal(refusal: Refusal) -> bytes:
    """OpenAI's error object."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(refusal.status)
    error = {
        "message": str(refusal),
        "type": kind or ("invalid_request_error" if refusal.status < 500 else "server_error"),
        "param": refusal.details.get("param"),
        "code": refusal.code,
    }
    return orjson.dumps({"error": error})


def _whole(asked: Completion, head: Mapping[str, Any], texts: Sequence[Text]) -> bytes:
    groups = [texts[at : at + asked.best_of] for at in range(0, len(texts), asked.best_of)]
    choices: list[dict[str, Any]] = []
    for prompt, group in zip(asked.prompts, groups, strict=True):
        echoed = prompt if asked.echo and isinstance(prompt, str) else ""
        ranked = sorted(group, key=Text.mean_logprob, reverse=True)
        for text in group if len(group) == asked.n else ranked[: asked.n]:
            logprobs = _logprobs(asked, text.tokens, text.logprobs, text.top, 0)
            choices.append(_choice(len(choices), echoed + text.text, logprobs, text.finish_reason))
    usage = _usage(asked, texts)
    return orjson.dumps({**head, "choices": choices, "usage": usage})


async def _events(
    service: InferenceService, asked: Completion, head: Mapping[str, Any]
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. A refusal after the first piece is its last event."""
    texts = [Text() for _ in asked.requests()]
    usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}
    has_begun = False
    try:
        async with aclosing(pieces(service, asked.requests())) as found:
            async for at, piece in found:
                choice = _choice_of_piece(asked, at, texts[at], piece)
                texts[at].add(piece)
                yield _event({**head, "choices": [choice], **usage})
                has_begun = True
    except Refusal as refusal:
        if not has_begun:
            raise
        yield b"data: " + encode_refusal(refusal) + b"\n\n"
        return
    if asked.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(asked, texts)})
    yield _DONE


def _choice_of_piece(asked: Completion, at: int, before: Text, piece: GeneratedText) -> dict[str, Any]:
    prompt = asked.prompts[at // asked.n]
    is_first = not before.completion_tokens and not before.text
    echoed = prompt if asked.echo and isinstance(prompt, str) and is_first else ""
    offset = sum(map(len, before.tokens))
    logprobs = _logprobs(asked, piece.tokens, piece.logprobs, piece.top, offset)
    return _choice(at, echoed + piece.text, logprobs, piece.finish_reason)


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(
    asked: Completion,
    tokens: Sequence[str],
    logprobs: Sequence[float],
    top: Sequence[Mapping[str, float]],
    offset: int,
) -> dict[str, Any] | None:
    """`top_logprobs` always has the token itself. `offset`: characters of the text before the first token."""
    if asked.template.logprobs is None:
        return None
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    others = top or [{}] * len(tokens)
    return {
        "tokens": list(tokens),
        "token_logprobs": list(logprobs),
        "top_logprobs": [
            {**each, token: logprob} for each, token, logprob in zip(others, tokens, logprobs, strict=True)
        ],
        "text_offset": offsets,
    }


def _usage(asked: Completion, texts: Sequence[Text]) -> dict[str, int]:
    """Tokens of each prompt once, and of all texts, also of those that were not the best."""
    prompt = sum(each.prompt_tokens for each in texts[:: asked.best_of])
    completion = sum(each.completion_tokens for each in texts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "fedloop"}


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"
