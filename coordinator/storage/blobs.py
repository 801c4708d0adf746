"""Files that updates and models are kept in: blobs, and the part files of unfinished uploads.

A blob's name is the SHA-256 of its bytes. `put` and `put_arrays` return once the bytes are durable: write to a temporary
name, fsync, rename, fsync the folder. A blob never changes, and is removed when nothing refers to it. A new blob is kept
for an hour without a reference, such as a database row.

An unfinished upload is a part file, one per task, in `uploads` of the coordinator's home. It grows by pieces in order, and
its size is the offset at which the upload resumes, also after a restart. One piece of a task is written at a time. The hash
is updated with each piece, so that a large result need not be read again at the end.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.files import file_sha256, sync_file, sync_folder, write_durably
from edge_client.relay.inflation import inflate
from edge_client.wire import arrays
from edge_client.wire.arrays import FilePayload, StoredArrays
from strategies.params import Tensors

GRACE_SECONDS = 3600.0
"""How long an unreferenced new blob is kept, and a temporary file that may still be written."""

_PART, _DECODED = ".part", ".decoded"


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
        written: dict[Path, str] = {}
        stem = f".arrays.{os.getpid()}.{threading.get_native_id()}"
        try:
            for number, (tensors, values) in enumerate(sets):
                info = self._known(tensors, values)
                if info is None:
                    temporary = self._folder / f"{stem}.{number}.tmp"
                    written[temporary] = ""
                    digest = written[temporary] = arrays.write(temporary, tensors, values)
                    sync_file(temporary)
                    info = BlobInfo(digest, temporary.stat().st_size)
                infos.append(info)
            for temporary, digest in written.items():
                self._expect(digest)
                temporary.replace(self.path(digest))
        except BaseException:
            for temporary in written:
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
            if file_sha256(path) != digest:
                raise BlobDamaged(f"{path} does not hold what its name says")
        except (FileNotFoundError, IsADirectoryError):
            raise self._missing(path) from None
        return path

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
        return file_sha256(self.path)

    def inflate(self, decoded_bytes: int) -> str:
        """Writes `decoded`, never more than announced, and returns its SHA-256. As `edge_client.relay.inflation.inflate`.

        The caller removes `decoded`, also after an error.
        """
        return inflate(self.path, self.decoded, decoded_bytes)

    def remove(self) -> None:
        """Removes all bytes."""
        self.path.unlink(missing_ok=True)
        self.decoded.unlink(missing_ok=True)
        self._reset_hash()

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
