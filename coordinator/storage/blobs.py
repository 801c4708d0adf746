"""Content-addressed files: a blob's name is the SHA-256 of its bytes.

`put` and `put_arrays` return once the bytes are durable: write to a temporary name, fsync, rename, fsync the folder. A
blob never changes, and is removed when nothing refers to it. A new blob is kept for an hour without a reference, such
as a database row.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.files import sync_file, sync_folder, write_durably
from edge_client.wire import arrays
from edge_client.wire.arrays import FilePayload, StoredArrays
from strategies.params import Tensors

GRACE_SECONDS = 3600.0
"""How long an unreferenced new blob is kept, and a temporary file that may still be written."""


class BlobDamaged(ValueError):
    """A blob's bytes do not have the hash it is named by."""


@dataclass(frozen=True)
class BlobInfo:
    """A stored blob."""

    sha256: str
    size_bytes: int


class Blobs:
    """A folder of blobs. Several processes may read it; one writes, from any number of threads."""

    def __init__(self, folder: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._fresh: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        self.reference_lock = threading.Lock()
        """Lock between references and removal, since two runs may produce the same bytes. A remover holds it from the
        query for references to the removal; a writer from writing the row that refers to a blob to releasing the blob, and
        from storing a blob to holding it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._identity = _identity(folder)

    def path(self, digest: str) -> Path:
        """The path of the blob with this name, stored or not."""
        return self._folder / digest

    def require(self, digest: str) -> Path:
        """The path of a stored blob, without reading it.

        Raises:
            BlobDamaged: the file is missing.
            FileNotFoundError: the folder is missing.
        """
        path = self.path(digest)
        if not path.is_file():
            raise self._missing(path)
        return path

    def put(self, payload: bytes) -> str:
        """Stores bytes durably and returns their SHA-256. Storing them again costs a read and repairs a damaged blob."""
        digest = arrays.sha256(payload)
        self._expect(digest)
        try:
            self.require_intact(digest)
        except BlobDamaged:
            write_durably(self.path(digest), payload)
        return digest

    def put_arrays(self, tensors: Tensors, values: Mapping[str, Any] | None = None) -> BlobInfo:
        """Stores float32 tensors durably in the format of `arrays.encode`, without holding it in memory.

        Lazy tensors are computed as they are written. Storing a blob of this folder again costs nothing.

        Raises:
            OSError: the disk is full or not writable; nothing is left behind.
            NotFinite: tensors that are checked as they are read; nothing is left behind.
        """
        return self.put_all([(tensors, values)])[0]

    def put_all(self, sets: Sequence[tuple[Tensors, Mapping[str, Any] | None]]) -> list[BlobInfo]:
        """As `put_arrays` for each set; all are written before the first becomes a blob."""
        infos: list[BlobInfo] = []
        written: list[tuple[Path, str]] = []
        stem = f".arrays.{os.getpid()}.{threading.get_native_id()}"
        try:
            for number, (tensors, values) in enumerate(sets):
                info = self._known(tensors, values)
                if info is None:
                    temporary = self._folder / f"{stem}.{number}.tmp"
                    info = _write_arrays(temporary, tensors, values)
                    written.append((temporary, info.sha256))
                infos.append(info)
            for temporary, digest in written:
                self._expect(digest)
                temporary.replace(self.path(digest))
        except BaseException:
            for temporary, _ in written:
                temporary.unlink(missing_ok=True)
            raise
        if written:
            sync_folder(self._folder)
        return infos

    def open_arrays(self, digest: str) -> StoredArrays:
        """The arrays of a blob, each read on access. Reads the file once to verify it.

        Raises:
            BlobDamaged: the file was changed or is missing.
        """
        path = self.require_intact(digest)
        try:
            return StoredArrays(FilePayload(path))
        except arrays.Malformed as error:
            raise BlobDamaged(f"{path} does not hold arrays: {error}") from None

    def require_intact(self, digest: str) -> Path:
        """The path of a blob, after verifying its hash.

        Raises:
            BlobDamaged: the file was changed or is missing.
            OSError: it cannot be read at the moment, or the folder is missing, as when a disk is not mounted.
        """
        path = self.path(digest)
        try:
            if arrays.sha256_of(path) != digest:
                raise BlobDamaged(f"{path} does not hold what its name says")
        except (FileNotFoundError, IsADirectoryError):
            raise self._missing(path) from None
        return path

    def store_all(self, sets: Sequence[tuple[Tensors, Mapping[str, Any] | None]]) -> list[StoredArrays]:
        """As `put_all`, but returns the stored arrays."""
        return [StoredArrays(FilePayload(self.path(info.sha256))) for info in self.put_all(sets)]

    def adopt(self, file: Path, digest: str) -> None:
        """Turns a file, whose SHA-256 the caller knows to be `digest`, into a blob, durably.

        The file keeps its own name too if the file system allows hard links; nothing may write to it any more. It replaces
        an existing blob of that name, which may be damaged.

        Raises:
            OSError: the disk is full or not writable, or the file is gone.
        """
        self._expect(digest)
        sync_file(file)
        second = self._folder / f".adopted.{os.getpid()}.{threading.get_native_id()}.tmp"
        try:
            second.unlink(missing_ok=True)  # a link cannot replace another
            os.link(file, second)
            second.replace(self.path(digest))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP):
                raise
            file.replace(self.path(digest))
        finally:
            second.unlink(missing_ok=True)
        sync_folder(self._folder)

    @contextmanager
    def held(self, *digests: str) -> Iterator[None]:
        """Keeps blobs from being removed inside the block: from before they are stored until a row refers to them."""
        with self._lock:
            self._held.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(digests)
                self._held += Counter()  # drops zero counts

    def get(self, digest: str) -> bytes:
        """The bytes.

        Raises:
            BlobDamaged: the file was changed or is missing.
        """
        try:
            payload = (self._folder / digest).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            raise self._missing(self._folder / digest) from None
        if arrays.sha256(payload) != digest:
            raise BlobDamaged(f"{self._folder / digest} does not hold what its name says")
        return payload

    def keep_only(self, digests: Collection[str]) -> None:
        """Removes all other blobs that are neither held nor new, and temporary files that a crash left.

        A blob counts as new until a call of this names it, for an hour at most.
        """
        oldest = self._monotonic() - GRACE_SECONDS
        with self._lock:
            self._fresh = {
                name: stored
                for name, stored in self._fresh.items()
                if stored > oldest and name not in digests
            }
        for path in self._folder.iterdir():
            if path.name in digests or (path.suffix == ".tmp" and _age_seconds(path) < GRACE_SECONDS):
                continue
            with self._lock:
                if not self._held[path.name] and path.name not in self._fresh:
                    path.unlink(missing_ok=True)

    def remove(self, digests: Collection[str]) -> None:
        """Removes blobs without references, except held ones. The caller must hold `reference_lock`."""
        for digest in digests:
            with self._lock:
                if not self._held[digest]:
                    self._fresh.pop(digest, None)
                    self.path(digest).unlink(missing_ok=True)

    def _expect(self, digest: str) -> None:
        """Marks a blob as new before it is looked up or stored, so that it is not removed in between."""
        with self._lock:
            self._fresh[digest] = self._monotonic()

    def _missing(self, path: Path) -> Exception:
        """The error for a missing blob: lost, unless the folder itself is gone or unmounted and may come back."""
        if _identity(self._folder) == self._identity:
            return BlobDamaged(f"{path} is missing")
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))

    def _known(self, tensors: Tensors, values: Mapping[str, Any] | None) -> BlobInfo | None:
        """The blob that these tensors were read from, if it is in this folder and has the same values."""
        if not isinstance(tensors, StoredArrays) or not isinstance(tensors.payload, FilePayload):
            return None
        path = tensors.payload.path
        if path.parent != self._folder or tensors.header.values != dict(values or {}):
            return None
        self._expect(path.name)
        return BlobInfo(path.name, path.stat().st_size) if path.exists() else None


def _write_arrays(path: Path, tensors: Tensors, values: Mapping[str, Any] | None) -> BlobInfo:
    """Writes the arrays to a file, durably; leaves no file on failure."""
    try:
        digest = arrays.write(path, tensors, values)
        sync_file(path)
        return BlobInfo(digest, path.stat().st_size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode, which distinguish a folder from another at its path, such as an empty mount point."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
