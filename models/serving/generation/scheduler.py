"""Decides in every step which tokens of which sequences are computed (Yu 2022, Orca: iteration-level scheduling).

Sequences that generate get their next token in every step. Beside them at most `prefill_chunk` tokens of prompts are
computed, so that a long prompt delays the others a little in several steps instead of much in one (Agrawal 2024,
Sarathi-Serve). A prompt waits until blocks for all of it are free; where generated tokens then need more blocks than
there are, the sequence that came last gives up its own and waits again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.serving.generation.blocks import BlockPool, Digest, digests_of
from models.serving.generation.request import Request
from models.serving.generation.text import TextStream


@dataclass(eq=False)
class Sequence:
    """A request and how far it is.

    Attributes:
        tokens: prompt and generated tokens.
        blocks: those that hold its keys and values, in order.
        place: of the pool, where it got its first own block.
        computed: how many of its first tokens have keys and values in the blocks.
        cached_prompt_tokens: of these at the start.
        saved: contents of its blocks, when it has none itself.
    """

    request: Request
    generator: np.random.Generator
    text: TextStream | None
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    place: range | None = None
    digests: list[Digest] = field(default_factory=list)
    computed: int = 0
    cached_prompt_tokens: int | None = None
    saved: Any = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(frozen=True)
class Work:
    """The next `count` tokens of a sequence. `prompt`: whether they are computed as a piece of a prompt."""

    sequence: Sequence
    count: int
    prompt: bool


@dataclass
class Scheduler:
    """Sequences that run and those that wait, in the order of their arrival.

    Attributes:
        length: of the model's sequences.
        chunk: with `deterministic`, tokens of every piece of a prompt, a multiple of `block_tokens`.
        save, restore: copy contents of blocks out of the cache and into it, where sequences must not be recomputed.
    """

    pool: BlockPool
    block_tokens: int
    length: int
    max_batch: int
    prefill_chunk: int
    deterministic: bool
    chunk: int
    save: Callable[[list[int]], Any]
    restore: Callable[[list[int], Any], None]
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0

    def plan(self) -> list[Work]:
        """What to compute next. Afterwards every sequence named has blocks for it."""
        works = self._generating()
        budget = self.prefill_chunk
        for sequence in self.running:
            if self._in_prompt(sequence) and budget > 0:
                works.append(self._piece(sequence, budget))
                budget -= self._cost(works[-1])
        while budget > 0 and self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.running.append(self.waiting.popleft())
            if self._in_prompt(sequence):
                works.append(self._piece(sequence, budget))
                budget -= self._cost(works[-1])
        return works

    def computed(self, work: Work) -> bool:
        """Notes that `work` is done; whether the sequence's next token is to be drawn."""
        sequence = work.sequence
        sequence.computed += work.count
        # What was generated one by one is not shared where bits matter: a prompt's pieces would round differently.
        end = len(sequence.request.prompt) if self.deterministic else len(sequence.tokens)
        full = min(sequence.computed, end) // self.block_tokens
        if full > len(sequence.digests):
            tokens = sequence.tokens[: full * self.block_tokens]
            sequence.digests = self._digests(sequence, tokens, sequence.digests)
        for place in range((sequence.computed - work.count) // self.block_tokens, full):
            self.pool.publish(sequence.blocks[place], sequence.digests[place])
        return sequence.computed == len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def lose_cache(self) -> None:
        """All contents of blocks are gone: whatever ran is computed again from its tokens."""
        for sequence in [*self.running, *self.waiting]:
            self._release(sequence)
            sequence.computed, sequence.saved = 0, None
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self.pool.forget_all()

    def _generating(self) -> list[Work]:
        works: list[Work] = []
        for sequence in list(self.running):
            if sequence in self.running and not self._in_prompt(sequence) and self._grow(sequence):
                works.append(Work(sequence, 1, prompt=False))
        return works

    def _in_prompt(self, sequence: Sequence) -> bool:
        """Whether the next tokens are computed in pieces: those of a prompt, and what was generated before preemption."""
        end = len(sequence.request.prompt) if self.deterministic else len(sequence.tokens) - 1
        return sequence.computed < max(end, len(sequence.request.prompt))

    def _piece(self, sequence: Sequence, budget: int) -> Work:
        if self.deterministic:
            count = min(self.chunk, len(sequence.request.prompt) - sequence.computed)
        else:
            count = min(budget, len(sequence.tokens) - sequence.computed)
        return Work(sequence, count, prompt=True)

    def _cost(self, work: Work) -> int:
        return self.chunk if self.deterministic else work.count

    def _grow(self, sequence: Sequence) -> bool:
        """Gives a sequence the block of its next token; false if the sequence itself has to wait."""
        while len(sequence.blocks) * self.block_tokens <= sequence.computed:
            if self.pool.free:
                self._allocate(sequence)
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        if self.deterministic:
            held = -(-sequence.computed // self.block_tokens)
            sequence.saved = self.save(sequence.blocks[:held])
        else:
            sequence.computed = 0
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        """The end of a sequence is forgotten before its beginning, which others may share."""
        for block in reversed(sequence.blocks):
            self.pool.release(block)
        if sequence.place is not None:
            self.pool.leave(sequence.place)
        sequence.blocks, sequence.place = [], None

    def _allocate(self, sequence: Sequence) -> None:
        """One more block, after the last one if that is free."""
        if sequence.place is None:
            tokens = min(self.length, len(sequence.request.prompt) + sequence.request.max_tokens)
            sequence.place = self.pool.place(-(-tokens // self.block_tokens) - len(sequence.blocks))
            wanted = sequence.place.start
        else:
            wanted = sequence.blocks[-1] + 1
        sequence.blocks.append(self.pool.allocate(wanted))

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence blocks for all its tokens; false where they are not free."""
        shared = [] if sequence.saved is not None else self._shared(sequence)
        missing = -(-len(sequence.tokens) // self.block_tokens) - len(shared)
        # one for each that runs, so that it need not be preempted again at once
        reserve = len(self.running)
        if missing + reserve > self.pool.free - self.pool.unused_among(shared):
            return False
        for block in shared:
            self.pool.share(block)
        sequence.blocks = list(shared)
        for _ in range(missing):
            self._allocate(sequence)
        if sequence.saved is not None:
            held = -(-sequence.computed // self.block_tokens)
            self.restore(sequence.blocks[:held], sequence.saved)
            sequence.saved = None
        else:
            sequence.computed = len(shared) * self.block_tokens
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = sequence.computed
        return True

    def _shared(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of a sequence; its last token is computed in any case, for its logits."""
        unit = self.chunk if self.deterministic else self.block_tokens
        end = len(sequence.request.prompt) if self.deterministic else len(sequence.tokens)
        most = (end - 1) // unit * unit
        known = sequence.digests[: most // self.block_tokens]
        sequence.digests = self._digests(sequence, sequence.tokens[:most], known)
        found = len(self.pool.find(sequence.digests)) * self.block_tokens // unit * unit
        return self.pool.find(sequence.digests)[: found // self.block_tokens]

    def _digests(self, sequence: Sequence, tokens: list[int], known: list[Digest]) -> list[Digest]:
        return digests_of(tokens, self.block_tokens, known, sequence.request.cache_salt)
