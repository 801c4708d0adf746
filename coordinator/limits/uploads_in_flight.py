"""A limit on the memory of uploads; further uploads are told to come back.

Each piece in transit occupies two blocks, one being filled and one being hashed and written, and its connection's
buffers. An upload that is told to come back loses nothing: it resumes where it stopped. No upload keeps its slot for long
while others wait, so slow connections, or devices that send a byte now and then, share with all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.errors import Refusal

BLOCK_BYTES = 2**17
UPLOAD_BYTES = 8 * BLOCK_BYTES
"""Upper estimate for one piece: its two blocks, its connection's buffers, and decrypted bytes not yet read."""

SLOT_SECONDS = 20.0
"""How long a piece keeps its slot in any case; longer while no other upload waits."""
_WAITING_SECONDS = 10.0
"""How long after a refusal the refused upload counts as waiting."""
_RETRY_SECONDS = 2.0


class UploadSlots:
    """The uploads of this process. For one thread only, that of the event loop."""

    def __init__(self, limit_bytes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._slots = max(1, limit_bytes // UPLOAD_BYTES)
        self._monotonic = monotonic
        self._in_use = 0
        self._refused_at = -_WAITING_SECONDS

    @contextmanager
    def acquire(self) -> Iterator[Callable[[], None]]:
        """A slot, held while a piece is received; yields what checks that the piece may continue.

        Raises:
            Refusal: 503 `busy`, with `Retry-After`: no slot is free; from the check: its time is over and others wait.
        """
        if self._in_use >= self._slots:
            self._refused_at = self._monotonic()
            raise _busy(f"{self._in_use} uploads are in progress")
        self._in_use += 1
        acquired_at = self._monotonic()

        def check() -> None:
            now = self._monotonic()
            if now - acquired_at > SLOT_SECONDS and now - self._refused_at < _WAITING_SECONDS:
                raise _busy("other uploads wait for this slot")

        try:
            yield check
        finally:
            self._in_use -= 1


def _busy(reason: str) -> Refusal:
    message = f"{reason}; nothing of this upload is lost, resume it later"
    return Refusal(503, "busy", message, retry_after_seconds=_RETRY_SECONDS, closes=True)
