"""Generates tokens of many requests at once, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from models.serving.generation import request as requests
from models.serving.generation import sampling
from models.serving.generation.batch import Batch, Part, assemble
from models.serving.generation.blocks import BlockPool
from models.serving.generation.cached_model import CachedModel
from models.serving.generation.request import Event, FinishReason, InvalidRequest, Request
from models.serving.generation.scheduler import Scheduler, Work
from models.serving.generation.scheduler import Sequence as Running
from models.serving.generation.support import require_layout, verify
from models.serving.generation.text import Decode, TextStream
from models.zoo.spec import ModelSpec

DETERMINISTIC_CHUNK = 64
"""Tokens of a piece of a prompt, at most, where all pieces have the same shape: padding is computed too."""


@dataclass(frozen=True)
class Options:
    """Sizes of an engine.

    Attributes:
        blocks: of the cache; 0: as many as `max_batch` of the longest sequences need.
        block_tokens: tokens of a block.
        max_batch: sequences that run at once, at most.
        prefill_chunk: tokens of prompts that are computed in one step, at most.
        deterministic: an answer's bits depend on its request alone: shapes are fixed, and what a sequence that waits
            has in the cache is copied to host memory instead of computed again.
    """

    blocks: int = 0
    block_tokens: int = 16
    max_batch: int = 16
    prefill_chunk: int = 64
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, least in (("blocks", 0), ("block_tokens", 1), ("max_batch", 1), ("prefill_chunk", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {least} or more")
        if self.deterministic and self.prefill_chunk < self.block_tokens:
            raise ValueError(
                f"prefill_chunk is {self.prefill_chunk}, expected the {self.block_tokens} tokens of a block or more "
                "with deterministic = true"
            )

    @property
    def chunk(self) -> int:
        """Tokens of every piece of a prompt with `deterministic`."""
        most = max(self.block_tokens, min(self.prefill_chunk, DETERMINISTIC_CHUNK))
        return most // self.block_tokens * self.block_tokens


class CacheLost(RuntimeError):
    """What computes batches has lost its cache and can go on with an empty one."""


class Executor(Protocol):
    """Computes batches and keeps keys and values: in this process, or in others.

    Attributes:
        together: whether sequences had better attend in one operation (`assemble`).
    """

    @property
    def together(self) -> bool: ...

    def run(self, batch: Batch) -> torch.Tensor: ...

    def read(self, blocks: list[int]) -> Any: ...

    def write(self, blocks: list[int], contents: Any) -> None: ...


@dataclass(frozen=True)
class Statistics:
    """Counts of an engine since its start, and how full it is."""

    running: int
    waiting: int
    blocks_free: int
    blocks: int
    steps: int
    tokens_generated: int
    tokens_computed: int
    prompt_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    caches_lost: int


class Engine:
    """Requests in, events out. Not thread-safe: one thread calls it.

    Args:
        module: on the device that is to compute; its params are shared, not copied.
        decode: text of tokens, for `Event.text` and stop strings; None: only tokens.
        executor: given the number of blocks, what computes batches in place of `module`, which may then be on the meta
            device (`models.serving.generation.parallel`).

    Raises:
        CannotGenerate: the model is none that generates.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: ModelSpec,
        options: Options | None = None,
        decode: Decode | None = None,
        executor: Callable[[int], Executor] | None = None,
    ) -> None:
        options = options or Options()
        layout = require_layout(spec, module, options.deterministic)
        self.options, self.spec = options, spec
        self.length, self.vocab = spec.input_shape[0], spec.tokens
        self.blocks = options.blocks or options.max_batch * self._blocks_of(self.length)
        self._executor: Executor
        if not any(parameter.is_meta for parameter in module.parameters()):
            verify(spec, module, layout)
        if executor:
            self._executor = executor(self.blocks)
        else:
            self._executor = CachedModel(module, layout, self.blocks, options.block_tokens)
        self._decode = decode
        self._scheduler = Scheduler(
            BlockPool(self.blocks),
            options.block_tokens,
            self.length,
            options.max_batch,
            options.prefill_chunk,
            options.deterministic,
            options.chunk,
            self._executor.read,
            self._executor.write,
        )
        self._known: dict[str, Running] = {}
        self._cancelled: list[str] = []
        self._steps = self._generated = self._computed = self._lost = 0
        self._prompt_tokens = self._cached_prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would return events, now or after further steps."""
        return bool(self._known)

    @property
    def statistics(self) -> Statistics:
        scheduler = self._scheduler
        return Statistics(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.pool.free,
            self.blocks,
            self._steps,
            self._generated,
            self._computed,
            self._prompt_tokens,
            self._cached_prompt_tokens,
            scheduler.preemptions,
            self._lost,
        )

    def add(self, request: Request) -> None:
        """Accepts a request; its events come from the following steps.

        Raises:
            InvalidRequest: it cannot be answered.
        """
        requests.check(request, self.vocab, self.length)
        if request.id in self._known:
            raise InvalidRequest(
                "duplicate_id", f"request {request.id!r} is not finished yet; choose another id"
            )
        if request.stop and self._decode is None:
            raise InvalidRequest("cannot_decode", "stop strings need text, and this model's tokens have none")
        tokens = min(self.length, len(request.prompt) + request.max_tokens - 1)
        if (needed := self._blocks_of(tokens)) > self.blocks:
            raise InvalidRequest(
                "cache_too_small",
                f"{tokens:,} tokens of prompt and answer need {needed:,} blocks of the cache, it has {self.blocks:,}; "
                "ask for fewer tokens",
            )
        text = TextStream(self._decode, request.stop, request.prompt[-1:]) if self._decode else None
        generator = sampling.generator_of(request.sampling)
        sequence = Running(request, generator, text, list(request.prompt))
        self._known[request.id] = sequence
        self._scheduler.waiting.append(sequence)

    def cancel(self, request_id: str) -> bool:
        """Ends a request, whose last event comes from the next step; false where it is not known or finished."""
        if request_id not in self._known or request_id in self._cancelled:
            return False
        self._cancelled.append(request_id)
        return True

    def step(self) -> list[Event]:
        """Computes the next tokens and returns what they answer."""
        events = [self._end(self._known[request_id]) for request_id in self._cancelled]
        self._cancelled.clear()
        try:
            for work, logprobs in self._compute(self._scheduler.plan()):
                events.extend(self._advance(work, logprobs))
        except CacheLost:
            self.lose_cache()
        return events

    def lose_cache(self) -> None:
        """Forgets all keys and values; running requests go on by computing their tokens again."""
        self._lost += 1
        self._scheduler.lose_cache()

    def _compute(self, works: Sequence[Work]) -> list[tuple[list[Work], torch.Tensor]]:
        """All `works`, each with others, and the log-probabilities of those whose last token is computed."""
        if not works:
            return []
        self._steps += 1
        self._computed += sum(work.count for work in works)
        if not self.options.deterministic:
            return [self._run(works)]
        pieces = [[work] for work in works if work.prompt]
        generating = [work for work in works if not work.prompt]
        return [self._run(piece) for piece in pieces] + (
            [self._run(generating, self.options.max_batch)] if generating else []
        )

    def _run(self, works: Sequence[Work], pad_to: int = 0) -> tuple[list[Work], torch.Tensor]:
        parts = [self._part(work) for work in works]
        # kernels of GPUs sum in another order for another number of sequences
        together = self._executor.together and not self.options.deterministic
        batch, sources = assemble(parts, self.options.block_tokens, self.length, pad_to, together)
        logits = self._executor.run(batch)[: len(sources)]
        order = [works[source] for source in sources]
        rest = [work for work, part in zip(works, parts, strict=True) if not part.wanted]
        return [*order, *rest], sampling.logprobs_of(logits)

    def _part(self, work: Work) -> Part:
        sequence = work.sequence
        end = sequence.computed + work.count
        return Part(
            sequence.tokens[sequence.computed : end],
            sequence.computed,
            sequence.blocks,
            wanted=end == len(sequence.tokens),
            pad_to=self.options.chunk if work.prompt and self.options.deterministic else work.count,
        )

    def _advance(self, works: Sequence[Work], logprobs: torch.Tensor) -> list[Event]:
        """Draws the next token of each of the first `works`, for which there are log-probabilities."""
        drawing = [work.sequence for work in works if self._scheduler.computed(work)]
        samplings = [sequence.request.sampling for sequence in drawing]
        tokens = sampling.choose(logprobs, samplings, [sequence.generator for sequence in drawing])
        return [
            self._append(sequence, token, row)
            for sequence, token, row in zip(drawing, tokens, logprobs, strict=True)
        ]

    def _append(self, sequence: Running, token: int, logprobs: torch.Tensor) -> Event:
        request = sequence.request
        sequence.tokens.append(token)
        self._generated += 1
        if sequence.generated == 1:
            self._prompt_tokens += len(request.prompt)
            self._cached_prompt_tokens += sequence.cached_prompt_tokens or 0
        ends = token in request.stop_tokens
        text = sequence.text.push(token) if sequence.text and not ends else ""
        reason: FinishReason | None = None
        if ends or (sequence.text and sequence.text.stopped):
            reason = "stop"
        elif sequence.generated == request.max_tokens or len(sequence.tokens) > self.length:
            reason = "length"
        if reason:
            text += sequence.text.flush() if sequence.text else ""
            if sequence.text and sequence.text.stopped:
                reason = "stop"
            self._forget(sequence)
        return Event(
            request.id,
            token,
            text,
            float(logprobs[token]),
            sampling.top(logprobs, request.sampling.top_logprobs),
            reason,
            sequence.cached_prompt_tokens or 0,
        )

    def _end(self, sequence: Running) -> Event:
        self._forget(sequence)
        text = sequence.text.flush() if sequence.text else ""
        return Event(
            sequence.request.id,
            text=text,
            finish_reason="cancelled",
            cached_prompt_tokens=sequence.cached_prompt_tokens or 0,
        )

    def _forget(self, sequence: Running) -> None:
        self._scheduler.remove(sequence)
        del self._known[sequence.request.id]

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.options.block_tokens)
