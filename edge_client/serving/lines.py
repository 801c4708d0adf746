"""Reads requests as lines from a connection, within memory and time limits."""

from __future__ import annotations

import asyncio

LINE_BYTES = 8 * 2**20
"""Largest request."""

HELD_BYTES = 32 * 2**20
"""Memory for all incomplete or unanswered requests, beyond the first block of each connection."""

LINE_SECONDS = 10.0
"""Time limit from the first byte of a request to its last."""

BLOCK_BYTES = 64 * 1024
"""Memory that each connection may always use."""


class BadRequest(ValueError):
    """The line is not a valid request; the message says why."""


class MemoryBudget:
    """Memory left for the requests of all connections."""

    def __init__(self) -> None:
        self._left_bytes = HELD_BYTES

    def take(self, size_bytes: int) -> None:
        """Reserves so many bytes; a negative number releases them.

        Raises:
            BadRequest: too few bytes are left.
        """
        if size_bytes > self._left_bytes:
            raise BadRequest(
                f"requests of more than {HELD_BYTES} bytes are being received and answered; try again"
            )
        self._left_bytes -= size_bytes


class Lines:
    """The requests of one connection. `close` releases their memory."""

    def __init__(self, reader: asyncio.StreamReader, budget: MemoryBudget) -> None:
        self._reader, self._budget = reader, budget
        self._buffer = bytearray()
        self._line_bytes = 0
        """Size of the last request returned, which is being answered."""
        self._reserved_bytes = 0

    async def next(self) -> bytes:
        """The next request; the previous one counts as answered. Empty at the end.

        Raises:
            BadRequest: the request is too long, too slow, or exceeds the shared memory. The connection is unusable then.
        """
        self._line_bytes = 0
        self._update_budget()
        if not self._buffer and not await self._read_block():
            return b""
        try:
            async with asyncio.timeout(LINE_SECONDS):
                size = await self._size()
        except TimeoutError:
            raise BadRequest(f"a request was incomplete after {LINE_SECONDS:.0f} s") from None
        line = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        self._line_bytes = size
        return line

    def close(self) -> None:
        self._buffer.clear()
        self._line_bytes = 0
        self._update_budget()

    async def _size(self) -> int:
        """Size of the first line in the buffer, once it is complete or the connection ends."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > LINE_BYTES:
                raise BadRequest(f"a request has more than {LINE_BYTES} bytes")
            if not await self._read_block():
                return searched
        return end + 1

    async def _read_block(self) -> bool:
        """Reads a block; False at the end."""
        block = await self._reader.read(BLOCK_BYTES)
        self._buffer += block
        self._update_budget()
        return bool(block)

    def _update_budget(self) -> None:
        needed = max(0, len(self._buffer) + self._line_bytes - BLOCK_BYTES)
        self._budget.take(needed - self._reserved_bytes)
        self._reserved_bytes = needed
