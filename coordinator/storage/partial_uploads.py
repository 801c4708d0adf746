"""Part files: unfinished uploads, one file per task, in `uploads` of the coordinator's home.

A part file grows by pieces in order, and its size is the offset at which the upload resumes, also after a restart. One
piece of a task is written at a time. The hash is updated with each piece, so that a large result need not be read again
at the end.
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
        decoded: the inflated bytes, while they are checked.
        lock: held while working on the files.
    """

    path: Path
    decoded: Path
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _hasher: Any = field(default_factory=hashlib.sha256)
    _hashed_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes received; 0 before the upload began."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def write(self, offset: int, piece: bytes | bytearray) -> None:
        """Writes a piece at its offset.

        Raises:
            OSError: the disk is full; part of the piece may have been written, see `truncate`.
        """
        self.path.parent.mkdir(exist_ok=True)  # but not the home, which may not be mounted
        with self.path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)
        if offset == 0:
            self._reset_hash()
        if offset == self._hashed_bytes:
            self._hasher.update(piece)
            self._hashed_bytes += len(piece)

    def truncate(self, size_bytes: int) -> None:
        """Drops whatever was written beyond this size."""
        if self.size_bytes > size_bytes:
            with self.path.open("r+b") as file:
                file.truncate(size_bytes)
            self._reset_hash()

    def sha256(self) -> str:
        """The hash of all bytes so far."""
        if self._hashed_bytes == self.size_bytes:
            return str(self._hasher.hexdigest())
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def inflate(self, decoded_bytes: int) -> str:
        """Writes `decoded`, never more than announced, and returns its SHA-256.

        Raises:
            BadEncoding: not a zlib stream, or one of another size than announced.
            OSError: the disk is full; `decoded` is removed.
        """
        try:
            return self._inflate(decoded_bytes)
        except BaseException:
            self.decoded.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Removes all bytes."""
        self.path.unlink(missing_ok=True)
        self.decoded.unlink(missing_ok=True)
        self._reset_hash()

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

    def _reset_hash(self) -> None:
        self._hasher, self._hashed_bytes = hashlib.sha256(), 0


class PartFiles:
    """The uploads of this process, the only one to use the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._transfers: dict[str, Transfer] = {}

    def of(self, task: str) -> Transfer:
        """The upload of a task, whose id must be known to be valid."""
        with self._lock:
            if task not in self._transfers:
                self._transfers[task] = Transfer(
                    self._folder / f"{task}{_PART}", self._folder / f"{task}{_DECODED}"
                )
            return self._transfers[task]

    def tasks(self) -> set[str]:
        """Tasks with an upload, also from before a restart."""
        with self._lock:
            tasks = set(self._transfers)
        return tasks | {path.stem for path in self._folder.glob("*") if path.suffix in (_PART, _DECODED)}

    def forget(self, tasks: Collection[str]) -> None:
        """Removes the uploads of tasks that can no longer be answered."""
        for task in tasks:
            self.of(task).remove()
            with self._lock:
                self._transfers.pop(task, None)
