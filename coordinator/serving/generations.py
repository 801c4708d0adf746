"""The texts that the workers of a version generate now: each goes to one worker, whose events come back piece by piece.

If its worker ends, a text is generated again by another one, with the same seed; what the client has already is left out. Where that
comes out differently, as rounding in other company may make it, the text ends with a refusal.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coordinator.errors import Refusal
from coordinator.serving.inference import GeneratedText, GenerationRequest
from coordinator.serving.workers import Worker

ATTEMPTS = 2
"""Workers that one text may end before it is refused."""
MOST = 4096
"""Texts that are generated or wait at once."""


@dataclass(frozen=True)
class Prompt:
    """A request as a worker takes it. `prompt`: token ids."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: dict[str, Any]
    stop: Sequence[str]

    @staticmethod
    def of(request: GenerationRequest, ids: Sequence[int]) -> Prompt:
        """`ids`: of the request's prompt. Without a seed it gets one, so that it can be generated again."""
        seed = secrets.randbits(63) if request.seed is None else request.seed
        sampling = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": seed,
            "top_logprobs": request.logprobs or 0,
        }
        return Prompt(ids, request.max_tokens, sampling, request.stop)


@dataclass(eq=False)
class _Running:
    id: str
    prompt: Prompt
    pieces: asyncio.Queue[GeneratedText | Refusal] = field(default_factory=asyncio.Queue)
    worker: Worker | None = None
    sent: list[str] = field(default_factory=list)
    """Tokens that the client has."""
    repeated: int = 0
    """Of those, how many have come again."""
    attempts: int = 0


class Generations:
    """`workers`: those that can take a text now; `on_need`: called when a text waits and there is none."""

    def __init__(self, workers: Callable[[], Sequence[Worker]], on_need: Callable[[], None]) -> None:
        self._workers = workers
        self._on_need = on_need
        self._running: dict[str, _Running] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._running)

    def count(self, worker: Worker) -> int:
        """Texts that a worker generates."""
        return sum(each.worker is worker for each in self._running.values())

    async def generate(self, prompt: Prompt) -> AsyncGenerator[GeneratedText, None]:
        """The pieces of a text. Closing the iterator ends its generation.

        Raises:
            Refusal: 400 for a prompt or an option that the model does not take, 429 `queue_full`, 500 `worker_died`, 503.
        """
        if len(self._running) >= MOST:
            raise Refusal(429, "queue_full", f"{MOST} texts are generated already", retry_after_seconds=1)
        running = _Running(str(next(self._numbers)), prompt)
        self._running[running.id] = running
        self._assign(running)
        try:
            while True:
                piece = await running.pieces.get()
                if isinstance(piece, Refusal):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            if self._running.pop(running.id, None) is not None and running.worker is not None:
                running.worker.send({"kind": "cancel", "id": running.id})

    def deliver(self, events: Sequence[Sequence[Any]]) -> None:
        """Events of a worker."""
        for event in events:
            running = self._running.get(event[0])
            if running is not None:  # else its client has gone
                self._deliver(running, event)

    def resume(self) -> None:
        """A worker is there: it gets the texts that wait for one."""
        for running in list(self._running.values()):
            if running.worker is None:
                self._assign(running)

    def lost(self, worker: Worker) -> None:
        """A worker has ended: its texts are generated again."""
        for running in list(self._running.values()):
            if running.worker is worker:
                running.worker, running.repeated = None, 0
                running.attempts += 1
                if running.attempts >= ATTEMPTS:
                    text = f"{ATTEMPTS} workers have ended while they generated this text"
                    self._end(running, Refusal(500, "worker_died", text))
                else:
                    self._assign(running)

    def refuse_all(self, refusal: Refusal) -> None:
        for running in list(self._running.values()):
            self._end(running, refusal)

    def _assign(self, running: _Running) -> None:
        workers = self._workers()
        if not workers:
            self._on_need()
            return
        counts = {id(each): 0 for each in workers}
        for other in self._running.values():
            if other.worker is not None and id(other.worker) in counts:
                counts[id(other.worker)] += 1
        running.worker = min(workers, key=lambda each: counts[id(each)])
        running.worker.send({"kind": "generate", "id": running.id, **asdict(running.prompt)})

    def _deliver(self, running: _Running, event: Sequence[Any]) -> None:
        if event[1] == "refused" and len(event) == 4:
            self._end(running, Refusal(400, event[2], event[3], param="prompt"))
            return
        _, text, tokens, logprobs, top, reason, _ = event
        if running.repeated < len(running.sent):
            if tokens and tokens[0] == running.sent[running.repeated] and reason is None:
                running.repeated += 1
                return
            text = "a worker has ended, and the text does not come out the same again"
            self._end(running, Refusal(500, "worker_died", text))
            return
        running.sent += tokens
        running.repeated = len(running.sent)
        asked = running.prompt.sampling["top_logprobs"]
        piece = GeneratedText(
            text,
            tokens,
            logprobs,
            [dict(top)] if tokens and asked else [],
            reason,
            len(running.prompt.prompt),
            len(running.sent),
        )
        running.pieces.put_nowait(piece)
        if reason is not None:
            del self._running[running.id]

    def _end(self, running: _Running, refusal: Refusal) -> None:
        del self._running[running.id]
        running.pieces.put_nowait(refusal)
