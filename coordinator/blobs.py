"""Content-addressed files: a blob's name is the SHA-256 of its bytes.

`put` returns only when the bytes survive a crash: write to a temporary name, fsync, rename, fsync the
folder. A blob is never changed; it goes when nothing refers to it any more.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from edge_client.files import write_durably
from edge_client.wire import arrays


class BlobDamaged(ValueError):
    """A blob's bytes do not have the hash it is named by."""


class Blobs:
    """A folder of blobs; several processes may read it, one writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, payload: bytes) -> str:
        """Stores bytes durably and returns their SHA-256. Storing them twice costs nothing."""
        digest = arrays.sha256(payload)
        path = self._folder / digest
        if not path.exists():
            write_durably(path, payload)
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes.

        Raises:
            BlobDamaged: the file was changed or is missing.
        """
        try:
            payload = (self._folder / digest).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            raise BlobDamaged(f"{self._folder / digest} is missing") from None
        if arrays.sha256(payload) != digest:
            raise BlobDamaged(f"{self._folder / digest} does not hold what its name says")
        return payload

    def keep_only(self, digests: Collection[str]) -> None:
        """Removes every other blob, and temporary files a crash left behind."""
        for path in self._folder.iterdir():
            if path.name not in digests:
                path.unlink(missing_ok=True)
