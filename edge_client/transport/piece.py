"""Part of a file as the body of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO


class Piece:
    """Part of a file as a request body, read while it is sent. `check_cancelled` is called between blocks."""

    def __init__(
        self, file: BinaryIO, offset: int, size_bytes: int, check_cancelled: Callable[[], None]
    ) -> None:
        file.seek(offset)
        self.size_bytes = size_bytes
        self._file = file
        self._left = size_bytes
        self._check_cancelled = check_cancelled

    def read(self, size: int = -1) -> bytes:
        self._check_cancelled()
        block = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(block)
        return block
