"""Files that are there whole or not at all, and other people's files, read with care.

Standard library only, so that any worker may import it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that say that a disk is full, or has no more for us."""

SPARE_BYTES = 4_000_000
"""Disk that downloads leave for the daemon's own files."""

READ_LIMIT_BYTES = 2 * 1024**3
"""Largest file of a user that is read as a whole: a table, images, a model's params."""

_PIECE_BYTES = 1024 * 1024
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces `path` by `content`, whole or not at all, also across a power cut and beside other writers.

    `mode` is what the file is made with, less the umask: never readable more widely, not for a moment.

    Raises:
        OSError: the disk is full or not writable; `path` is as it was.
    """
    make_durably(path, lambda temporary: temporary.write_bytes(content), mode=mode)


def make_durably(path: Path, write: Callable[[Path], object], *, mode: int = 0o666) -> None:
    """The same for content that `write` puts into the file it is given."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode))
        write(temporary)
        sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(folder: Path, *, mode: int = 0o700) -> None:
    """Makes a folder, and those above that are missing, so that they outlast a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent, mode=mode)
    folder.mkdir(mode=mode, exist_ok=True)
    sync_folder(folder.parent)


def sync_file(path: Path) -> None:
    """Makes what was written to a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path, going: Callable[[], None] = lambda: None) -> str:
    """Lower-case hex digest, `going` called between the pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_PIECE_BYTES):
            going()
            digest.update(chunk)
    return digest.hexdigest()


def open_regular(path: Path, limit_bytes: int = READ_LIMIT_BYTES) -> BufferedReader:
    """A regular file, opened for reading. Links are followed.

    Raises:
        OSError: as `open` does; or it is no regular file, or larger than the limit, as `strerror` says.
    """
    require_regular(
        path.stat(), limit_bytes
    )  # first: to open a pipe may take forever, and a device may act on it
    return _opened(os.open(path, _READING), limit_bytes)


def read_regular(path: Path, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
    """The content of a regular file. Raises: OSError: as `open_regular`."""
    with open_regular(path, limit_bytes) as file:
        return read_all(file)


def read_all(file: BufferedReader) -> bytes:
    """What an opened file holds, by its size now: one that grows meanwhile is not followed."""
    return file.read(os.fstat(file.fileno()).st_size)


def is_beneath(path: Path, folders: Iterable[Path]) -> bool:
    """Whether `path`, with every link on the way followed, lies in one of `folders`. It need not exist."""
    return _folder_of(_followed(path), folders) is not None


def open_beneath(path: Path, folders: Iterable[Path], limit_bytes: int = READ_LIMIT_BYTES) -> BufferedReader:
    """As `open_regular`, for a file in one of `folders`. Whoever swaps links meanwhile gains nothing.

    Raises:
        OSError: as `open_regular`; or it lies elsewhere.
    """
    real = _followed(path)
    folder = _folder_of(real, folders)
    if folder is None:
        raise PermissionError(errno.EACCES, "lies outside of the folders to read from")
    *above, name = real.relative_to(folder).parts or (".",)
    with ExitStack() as stack:
        place = os.open(folder, _PASSING)
        stack.callback(os.close, place)
        for part in above:
            place = os.open(part, _PASSING | os.O_NOFOLLOW, dir_fd=place)
            stack.callback(os.close, place)
        require_regular(os.stat(name, dir_fd=place, follow_symlinks=False), limit_bytes)
        return _opened(os.open(name, _READING | os.O_NOFOLLOW, dir_fd=place), limit_bytes)


def require_regular(found: os.stat_result, limit_bytes: int = READ_LIMIT_BYTES) -> None:
    """Lets a regular file of at most `limit_bytes` pass.

    Raises:
        OSError: it is something else, or larger; `strerror` says which.
    """
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file")
    if found.st_size > limit_bytes:
        raise OSError(errno.EOVERFLOW, f"it has {found.st_size:,} bytes, expected at most {limit_bytes:,}")


_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PASSING = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def _opened(handle: int, limit_bytes: int) -> BufferedReader:
    try:
        require_regular(os.fstat(handle), limit_bytes)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _followed(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError:  # what Python 3.11 makes of links in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def _folder_of(real: Path, folders: Iterable[Path]) -> Path | None:
    return next((each for each in map(_followed, folders) if real.is_relative_to(each)), None)
