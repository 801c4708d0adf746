"""The bookkeeping of a paged cache: which blocks of a pool belong to which sequences (Kwon 2023, PagedAttention).

A block holds keys and values of `block_tokens` consecutive tokens of every layer. A full block is known by a digest of its
tokens and all before them, so that another sequence with the same beginning uses it too. Blocks that no sequence uses
keep what they hold until their place is needed; the least recently used goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Digest = bytes
Whole = npt.NDArray[np.int64]
SCRATCH = 0
"""The block that belongs to nobody: padding is written to it."""


class BlockPool:
    """Blocks 1 to `count`, each empty, in use by some sequences, or unused and known by its digest.

    Blocks of a sequence that follow one another are read where they are, others are copied first. So a sequence begins
    where as many blocks as it may need are free, and its place is left to it as long as others find one.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = np.zeros(count + 1, np.int64)
        self._users[SCRATCH] = 1
        self._places = np.zeros(count + 1, np.int64)
        self._released = np.zeros(count + 1, np.int64)
        self._digests: list[Digest | None] = [None] * (count + 1)
        self._known: dict[Digest, int] = {}
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._clock = 0

    @property
    def free(self) -> int:
        """How many blocks `allocate` could give."""
        return len(self._empty) + len(self._unused)

    def place(self, count: int) -> range:
        """Where a sequence of up to `count` blocks had best begin: where blocks are free, not others' places, and least
        recently used. It is kept until `leave`."""
        cost = self._released + self._places * (self._clock + 1)
        cost[self._users > 0] = np.iinfo(np.int64).max
        start = 1 + int(_window_maxima(cost[1:], min(count, self.count)).argmin())
        self._places[start : start + count] += 1
        return range(start, start + count)

    def leave(self, place: range) -> None:
        """The place is no longer kept for a sequence."""
        self._places[place.start : place.stop] -= 1

    def allocate(self, wanted: int) -> int:
        """A block for one sequence, the `wanted` one if it is free; IndexError where none is."""
        if wanted in self._empty:
            block = wanted
            del self._empty[block]
        elif wanted in self._unused:
            block = wanted
            del self._unused[block]
        elif self._empty:
            block, _ = self._empty.popitem(last=False)
        elif self._unused:
            block, _ = self._unused.popitem(last=False)
        else:
            raise IndexError("no block is free")
        self._forget(block)
        self._users[block] = 1
        return block

    def find(self, digests: Sequence[Digest]) -> list[int]:
        """The blocks of the longest known beginning of `digests`."""
        found = []
        for digest in digests:
            if (block := self._known.get(digest)) is None:
                break
            found.append(block)
        return found

    def unused_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks count as free."""
        return sum(block in self._unused for block in blocks)

    def share(self, block: int) -> None:
        """One more sequence uses a known block."""
        self._unused.pop(block, None)
        self._users[block] += 1

    def release(self, block: int) -> None:
        """One sequence less uses the block."""
        self._users[block] -= 1
        if not self._users[block]:
            if self._digests[block] is None:
                self._empty[block] = None
            else:
                self._clock += 1
                self._released[block] = self._clock
                self._unused[block] = None

    def publish(self, block: int, digest: Digest) -> None:
        """From now on the full block is known by its digest, unless another with the same content is."""
        if digest not in self._known and self._digests[block] is None:
            self._known[digest] = block
            self._digests[block] = digest

    def forget_all(self) -> None:
        """No block is known any more: the memory was lost. Those in use stay so."""
        for block in list(self._known.values()):
            self._forget(block)
        self._empty.update(self._unused)
        self._unused.clear()

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._known[digest]
            self._digests[block] = None
        self._released[block] = 0


def _window_maxima(values: Whole, width: int) -> Whole:
    """The largest of each `width` consecutive values, in time that does not depend on `width` (van Herk 1992)."""
    padding = -len(values) % width
    rows = np.pad(values, (0, padding), constant_values=np.iinfo(np.int64).max).reshape(-1, width)
    upto = np.maximum.accumulate(rows, axis=1).ravel()
    since = np.maximum.accumulate(rows[:, ::-1], axis=1)[:, ::-1].ravel()
    maxima: Whole = np.maximum(since[: len(values) - width + 1], upto[width - 1 : len(values)])
    return maxima


def digests_of(
    tokens: Sequence[int], block_tokens: int, known: Sequence[Digest] = (), salt: str = ""
) -> list[Digest]:
    """Digests of the full blocks of `tokens`; `known`: those of the first ones; `salt`: makes them differ.

    A collision would show one request what another was asked, so digests are cryptographic.
    """
    digests = list(known)
    for start in range(len(digests) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        content = np.asarray(tokens[start : start + block_tokens], np.int64).tobytes()
        before = digests[-1] if digests else hashlib.sha256(salt.encode()).digest()
        digests.append(hashlib.sha256(before + content).digest())
    return digests
