"""Uploads in pieces, named by their expected SHA-256, which is checked when they are published or registered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from coordinator.errors import Refusal
from coordinator.model_references import is_sha256
from coordinator.releases.roles import TARGET_LIMIT_BYTES

ABANDONED_SECONDS = 86_400.0


class Incoming:
    """The uploads in one folder. They grow by pieces in order; an interrupted upload resumes where it stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def offset(self, sha256: str) -> int:
        """Bytes received."""
        path = self._path(sha256)
        return path.stat().st_size if path.exists() else 0

    def write(self, sha256: str, offset: int, piece: bytes) -> int:
        """Appends a piece and returns the new offset. A piece that is not the next one changes nothing.

        Raises:
            Refusal: 404 `not_found`: not a SHA-256; 413 `oversized`.
            OSError: the disk is full.
        """
        path = self._path(sha256)
        with self._lock:
            received = self.offset(sha256)
            if offset != received:
                return received
            if received + len(piece) > TARGET_LIMIT_BYTES:
                raise Refusal(413, "oversized", f"a file here has at most {TARGET_LIMIT_BYTES} bytes")
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with path.open("ab") as file:
                    file.write(piece)
            except OSError:
                with path.open("r+b") as file:
                    file.truncate(received)
                raise
            return received + len(piece)

    def file(self, sha256: str) -> Path:
        """The path of an upload. Raises: Refusal: 422 `missing_file`: nothing of it was sent."""
        path = self._path(sha256)
        if not path.exists():
            raise Refusal(422, "missing_file", f"the file with SHA-256 {sha256} was not sent")
        return path

    def read(self, sha256: str, limit_bytes: int) -> bytes:
        """A small upload. Raises: Refusal: 422 `missing_file`; 413 `oversized`."""
        path = self.file(sha256)
        if path.stat().st_size > limit_bytes:
            raise Refusal(413, "oversized", f"metadata of this kind has at most {limit_bytes} bytes")
        return path.read_bytes()

    def take(self, sha256: str, place: Path) -> None:
        """Moves an upload to `place` on the same disk; nothing can be appended to it afterwards.

        Raises:
            Refusal: 422 `missing_file`: nothing of it was sent.
        """
        with self._lock:
            self.file(sha256).rename(place)

    def remove(self, digests: Iterable[str]) -> None:
        """Removes these uploads, and those abandoned for a day; other clients' uploads stay."""
        for sha256 in digests:
            self._path(sha256).unlink(missing_ok=True)
        for path in self._folder.glob("*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def clear(self) -> None:
        """Removes all uploads."""
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        if not is_sha256(sha256):
            raise Refusal(404, "not_found", "expected a SHA-256 in hex")
        return self._folder / sha256
