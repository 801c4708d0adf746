"""Part files: uploads on their way, one file a task, in `uploads` of the coordinator's home.

A part file only grows, by pieces in order, and its size is how far the upload came; so whoever starts an upload
again, or the coordinator itself, knows where to go on. One piece of a task is written at a time. A hash
is carried along, so that a large result is not read again when its last piece came.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 2**20
_PART, _DECODED = ".part", ".decoded"


class BadEncoding(ValueError):
    """The bytes do not inflate to what was announced."""


@dataclass
class Transfer:
    """One task's upload.

    Attributes:
        path: the bytes as sent.
        decoded: what they inflate to, while they are checked.
        turn: held by whoever works on the files.
    """

    path: Path
    decoded: Path
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _hasher: Any = field(default_factory=hashlib.sha256)
    _hashed_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """How far the upload came; 0 before it began."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def write(self, offset: int, piece: bytes | bytearray) -> None:
        """Puts a piece where it belongs.

        Raises:
            OSError: the disk is full; part of the piece may have been written, see `cut_back`.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)
        if offset == 0:
            self._forget()
        if offset == self._hashed_bytes:
            self._hasher.update(piece)
            self._hashed_bytes += len(piece)

    def cut_back(self, size_bytes: int) -> None:
        """Takes back whatever was written beyond this size."""
        if self.size_bytes > size_bytes:
            with self.path.open("r+b") as file:
                file.truncate(size_bytes)
            self._forget()

    def sha256(self) -> str:
        """Of all bytes so far."""
        if self._hashed_bytes == self.size_bytes:
            return str(self._hasher.hexdigest())
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def inflate(self, decoded_bytes: int) -> str:
        """Writes `decoded`, never more than announced, and returns its SHA-256.

        Raises:
            BadEncoding: no zlib stream, or one of another size than announced.
            OSError: the disk is full; `decoded` is removed.
        """
        try:
            return self._inflate(decoded_bytes)
        except BaseException:
            self.decoded.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Forgets all bytes."""
        self.path.unlink(missing_ok=True)
        self.decoded.unlink(missing_ok=True)
        self._forget()

    def _inflate(self, decoded_bytes: int) -> str:
        stream, hasher, size = zlib.decompressobj(), hashlib.sha256(), 0
        with self.path.open("rb") as source, self.decoded.open("wb") as target:
            while (block := source.read(_BLOCK_BYTES)) and not stream.eof:
                while block:
                    try:
                        plain = stream.decompress(block, _BLOCK_BYTES)
                    except zlib.error as error:
                        raise BadEncoding(f"not a zlib stream: {error}") from None
                    size += len(plain)
                    if size > decoded_bytes:
                        raise BadEncoding(f"inflates to more than the announced {decoded_bytes} bytes")
                    hasher.update(plain)
                    target.write(plain)
                    block = stream.unconsumed_tail
            if not stream.eof or stream.unused_data or block:
                raise BadEncoding("the zlib stream does not end where the upload does")
        if size != decoded_bytes:
            raise BadEncoding(f"inflates to {size} bytes, {decoded_bytes} were announced")
        return hasher.hexdigest()

    def _forget(self) -> None:
        self._hasher, self._hashed_bytes = hashlib.sha256(), 0


class PartFiles:
    """The uploads of this process. One process works on a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._transfers: dict[str, Transfer] = {}

    def of(self, task: str) -> Transfer:
        """The upload of a task whose id is known to be one of ours."""
        with self._lock:
            if task not in self._transfers:
                self._transfers[task] = Transfer(
                    self._folder / f"{task}{_PART}", self._folder / f"{task}{_DECODED}"
                )
            return self._transfers[task]

    def known(self) -> set[str]:
        """Tasks of which something is kept, also from before a restart."""
        with self._lock:
            tasks = set(self._transfers)
        return tasks | {path.stem for path in self._folder.glob("*") if path.suffix in (_PART, _DECODED)}

    def forget(self, tasks: Collection[str]) -> None:
        """Removes the uploads of tasks that nobody may answer any more."""
        for task in tasks:
            self.of(task).remove()
            with self._lock:
                self._transfers.pop(task, None)
