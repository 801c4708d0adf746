"""Content-addressed files: a blob's name is the SHA-256 of its bytes.

`put` and `put_arrays` return only when the bytes survive a crash: write to a temporary name, fsync, rename,
fsync the folder. A blob is never changed; it goes when nothing refers to it any more. Between being stored
and being referred to, such as by a row of a database, it has an hour.
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
"""How long a blob is kept that nothing refers to yet, and a temporary file that may still be written."""


class BlobDamaged(ValueError):
    """A blob's bytes do not have the hash it is named by."""


@dataclass(frozen=True)
class BlobInfo:
    """A stored blob."""

    sha256: str
    size_bytes: int


class Blobs:
    """A folder of blobs; several processes may read it, one writes, with any number of threads."""

    def __init__(self, folder: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._fresh: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        self.naming = threading.Lock()
        """Held by whoever removes what no row names, from looking to removing, and by whoever lets go of a blob that is
        about to be named, from writing the row to letting go; also from storing a blob to holding it. Two runs may come
        to the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where the blob of this name lies, or would."""
        return self._folder / digest

    def put(self, payload: bytes) -> str:
        """Stores bytes durably and returns their SHA-256. Storing them twice costs a read, and mends a damaged blob."""
        digest = arrays.sha256(payload)
        self._expect(digest)
        try:
            self.require_whole(digest)
        except BlobDamaged:
            write_durably(self.path(digest), payload)
        return digest

    def put_arrays(self, tensors: Tensors, values: Mapping[str, Any] | None = None) -> BlobInfo:
        """Stores what `arrays.encode` would make of float32 tensors, durably, without holding it in memory.

        Lazy tensors are computed as they are written. A blob of this folder put once more costs nothing.

        Raises:
            OSError: the disk is full or not writable; nothing is left behind.
            NotFinite: from tensors that are checked as they are read; nothing is left behind.
        """
        return self.put_all([(tensors, values)])[0]

    def put_all(self, sets: Sequence[tuple[Tensors, Mapping[str, Any] | None]]) -> list[BlobInfo]:
        """As `put_arrays` for each; all of them are written before the first becomes a blob."""
        infos: list[BlobInfo] = []
        written: list[tuple[Path, str]] = []
        stem = f".arrays.{os.getpid()}.{threading.get_native_id()}"
        try:
            for number, (tensors, values) in enumerate(sets):
                info = self._known(tensors, values)
                if info is None:
                    temporary = self._folder / f"{stem}.{number}.tmp"
                    info = _written(temporary, tensors, values)
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
        """The arrays of a blob, each read when it is asked for.

        Raises:
            BlobDamaged: the file was changed or is missing. It is read through once to know.
        """
        path = self.require_whole(digest)
        try:
            return StoredArrays(FilePayload(path))
        except arrays.Malformed as error:
            raise BlobDamaged(f"{path} does not hold arrays: {error}") from None

    def require_whole(self, digest: str) -> Path:
        """Where the blob lies, once all of it was read.

        Raises:
            BlobDamaged: the file was changed or is missing.
        """
        path = self.path(digest)
        try:
            if arrays.sha256_of(path) != digest:
                raise BlobDamaged(f"{path} does not hold what its name says")
        except (FileNotFoundError, IsADirectoryError):
            raise BlobDamaged(f"{path} is missing") from None
        return path

    def keep_all(self, sets: Sequence[tuple[Tensors, Mapping[str, Any] | None]]) -> list[StoredArrays]:
        """As `put_all`, and gives the stored arrays in place of the given ones."""
        return [StoredArrays(FilePayload(self.path(info.sha256))) for info in self.put_all(sets)]

    def adopt(self, file: Path, digest: str) -> None:
        """Makes a file, whose SHA-256 the caller knows to be `digest`, a blob, durably.

        The file keeps its name beside the blob's where the disk allows; it must not be written to any more. It takes the
        place of a blob of that name, which may be damaged.

        Raises:
            OSError: the disk is full or not writable, or the file is gone.
        """
        self._expect(digest)
        sync_file(file)
        second = self._folder / f".adopted.{os.getpid()}.{threading.get_native_id()}.tmp"
        try:
            second.unlink(missing_ok=True)  # a link cannot take the place of another
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
        """Removes every other blob that is neither held nor new, and temporary files a crash left behind.

        A blob is new from when it was stored until a call of this names it, for an hour at most.
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
        """Removes blobs that the caller knows nothing refers to; what is held stays. `naming` must be held."""
        for digest in digests:
            with self._lock:
                if not self._held[digest]:
                    self._fresh.pop(digest, None)
                    self.path(digest).unlink(missing_ok=True)

    def _expect(self, digest: str) -> None:
        """Called before a blob is looked for or put in place, so that it is not removed in between."""
        with self._lock:
            self._fresh[digest] = self._monotonic()

    def _known(self, tensors: Tensors, values: Mapping[str, Any] | None) -> BlobInfo | None:
        """The blob that these tensors were read from, if it is one of this folder with the same values."""
        if not isinstance(tensors, StoredArrays) or not isinstance(tensors.payload, FilePayload):
            return None
        path = tensors.payload.path
        if path.parent != self._folder or tensors.header.values != dict(values or {}):
            return None
        self._expect(path.name)
        return BlobInfo(path.name, path.stat().st_size) if path.exists() else None


def _written(path: Path, tensors: Tensors, values: Mapping[str, Any] | None) -> BlobInfo:
    """The arrays in a file, durably; no file where that fails."""
    try:
        digest = arrays.write(path, tensors, values)
        sync_file(path)
        return BlobInfo(digest, path.stat().st_size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
