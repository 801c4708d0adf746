"""The bookkeeping of a paged cache: which blocks of a pool belong to which sequences (Kwon 2023, PagedAttention).

A block holds keys and values of `block_tokens` consecutive tokens of every layer. A full block is known by a digest of its
tokens and all before them, so that another sequence with the same beginning uses it too. Blocks that no sequence uses
keep what they hold until their place is needed; the least recently used goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

Digest = bytes
SCRATCH = 0
"""The block that belongs to nobody: padding is written to it."""


class BlockPool:
    """Blocks 1 to `count`, each free, in use by some sequences, or unused and known by its digest."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * (count + 1)
        self._digests: list[Digest | None] = [None] * (count + 1)
        self._known: dict[Digest, int] = {}
        self._empty = deque(range(1, count + 1))
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """How many blocks `allocate` could give."""
        return len(self._empty) + len(self._unused)

    @property
    def cached(self) -> int:
        """How many blocks are known by their digests."""
        return len(self._known)

    def allocate(self) -> int:
        """A block for one sequence; IndexError where none is free."""
        if self._empty:
            block = self._empty.popleft()
        elif self._unused:
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no block is free")
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
                self._empty.append(block)
            else:
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
        self._empty.extend(self._unused)
        self._unused.clear()

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._known[digest]
            self._digests[block] = None


def digests_of(tokens: Sequence[int], block_tokens: int, known: Sequence[Digest] = ()) -> list[Digest]:
    """Digests of the full blocks of `tokens`; `known`: those of the first ones.

    A collision would show one request what another was asked, so digests are cryptographic.
    """
    digests = list(known)
    for start in range(len(digests) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        content = np.asarray(tokens[start : start + block_tokens], np.int64).tobytes()
        digests.append(hashlib.sha256((digests[-1] if digests else b"") + content).digest())
    return digests
