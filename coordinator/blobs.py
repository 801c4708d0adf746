"""Content-addressed files: a blob's name is the SHA-256 of its bytes.

`put` returns only when the bytes survive a crash: write to a temporary name, fsync, rename, fsync the
folder. A blob is never changed; it goes when nothing refers to it any more.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_client.files import sync_folder, write_durably
from edge_client.wire import arrays


class BlobDamaged(ValueError):
    """A blob's bytes do not have the hash it is named by."""


class Blobs:
    """A folder of blobs; several processes may read it, one writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where the blob of this name lies, or would."""
        return self._folder / digest

    def put(self, payload: bytes) -> str:
        """Stores bytes durably and returns their SHA-256. Storing them twice costs nothing."""
        digest = arrays.sha256(payload)
        path = self._folder / digest
        if not path.exists():
            write_durably(path, payload)
        return digest

    def adopt(self, file: Path, digest: str) -> None:
        """Makes a file, whose SHA-256 the caller knows to be `digest`, a blob, durably.

        The file keeps its name beside the blob's where the disk allows; it must not be written to any more.

        Raises:
            OSError: the disk is full or not writable, or the file is gone.
        """
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        try:
            os.link(file, self.path(digest))
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP):
                raise
            file.replace(self.path(digest))
        sync_folder(self._folder)

    @contextmanager
    def held(self, *digests: str) -> Iterator[None]:
        """Keeps blobs from being removed while the block runs: from before they are stored until a row names them."""
        with self._lock:
            self._held.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(digests)
                self._held += Counter()  # drops what nobody holds

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
        """Removes every other blob that is not held, and temporary files a crash left behind."""
        for path in self._folder.iterdir():
            if path.name not in digests:
                with self._lock:
                    if not self._held[path.name]:
                        path.unlink(missing_ok=True)
