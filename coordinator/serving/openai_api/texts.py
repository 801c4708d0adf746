"""Several texts at once: the pieces of each as they come, or each as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from coordinator.serving.inference import GeneratedText, GenerationRequest, InferenceService

_WAITING = 64
"""Pieces that wait for a client that reads slowly; beyond, generation waits too."""


@dataclass
class Text:
    """A text as far as it is known. `tokens`, `logprobs`, `top`: as in `GeneratedText`, of all of its tokens."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, piece: GeneratedText) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.top += map(dict, piece.top)
        self.finish_reason = piece.finish_reason
        self.prompt_tokens = piece.prompt_tokens
        self.completion_tokens = piece.completion_tokens

    def mean_logprob(self) -> float:
        """Of its tokens; of no tokens the lowest."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else float("-inf")


async def finished(service: InferenceService, requests: Sequence[GenerationRequest]) -> list[Text]:
    """The texts, when all have ended. Raises: Refusal: what the service raises for one; the others end then."""
    texts = [Text() for _ in requests]
    async with aclosing(pieces(service, requests)) as found:
        async for at, piece in found:
            texts[at].add(piece)
    return texts


async def pieces(
    service: InferenceService, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, GeneratedText], None]:
    """Pieces of all texts, each with the number of its request. Closing it ends the generation of all.

    Raises:
        Refusal: as `finished`.
    """
    waiting: asyncio.Queue[tuple[int, GeneratedText] | Exception | None] = asyncio.Queue(_WAITING)

    async def generate(at: int, request: GenerationRequest) -> None:
        try:
            async for piece in service.generate(request):
                await waiting.put((at, piece))
            await waiting.put(None)
        except Exception as error:
            await waiting.put(error)

    tasks = [asyncio.create_task(generate(at, request)) for at, request in enumerate(requests)]
    try:
        ended = 0
        while ended < len(tasks):
            found = await waiting.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                ended += 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
