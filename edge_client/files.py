"""Atomic, durable writes, and careful reads of untrusted files.

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
"""Errors of a full disk, an exceeded quota or a file size limit."""

SPARE_BYTES = 4_000_000
"""Free disk space that downloads leave for the daemon's own files."""

READ_LIMIT_BYTES = 2 * 1024**3
"""Largest user file that is read into memory: a table, images, a model's params."""

_PIECE_BYTES = 1024 * 1024
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def default_cache_dir() -> Path:
    """`$FEDLOOP_CACHE_DIR`, else `$XDG_CACHE_HOME/fedloop`, else `~/.cache/fedloop`."""
    if own := os.environ.get("FEDLOOP_CACHE_DIR"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedloop"


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces `path` by `content` atomically, also across a power cut and with concurrent writers.

    The file is created with `mode`, less the umask, so that it is never readable more widely.

    Raises:
        OSError: the disk is full or not writable; `path` is unchanged.
    """
    make_durably(path, lambda temporary: temporary.write_bytes(content), mode=mode)


def make_durably(path: Path, write: Callable[[Path], object], *, mode: int = 0o666) -> None:
    """As `write_durably`, for content that `write` puts into the path it receives."""
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
    """Creates a folder and its missing parents durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent, mode=mode)
    folder.mkdir(mode=mode, exist_ok=True)
    sync_folder(folder.parent)


def sync_file(path: Path) -> None:
    """Makes a file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path, check_cancelled: Callable[[], None] = lambda: None) -> str:
    """Lower-case hex digest; calls `check_cancelled` between the pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_PIECE_BYTES):
            check_cancelled()
            digest.update(chunk)
    return digest.hexdigest()


def open_regular(path: Path, limit_bytes: int = READ_LIMIT_BYTES) -> BufferedReader:
    """Opens a regular file for reading. Follows links.

    Raises:
        OSError: as `open`; or it is not a regular file, or larger than the limit: see `strerror`.
    """
    require_regular(
        path.stat(), limit_bytes
    )  # before opening: opening a pipe may block, and opening a device may have effects
    return _open_checked(os.open(path, _READ_FLAGS), limit_bytes)


def read_regular(path: Path, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
    """The content of a regular file. Raises: OSError: as `open_regular`."""
    with open_regular(path, limit_bytes) as file:
        return read_all(file)


def read_all(file: BufferedReader) -> bytes:
    """The content of an open file up to its current size, even if it grows meanwhile."""
    return file.read(os.fstat(file.fileno()).st_size)


def is_beneath(path: Path, folders: Iterable[Path]) -> bool:
    """Whether `path`, with all links resolved, is in one of `folders`. It need not exist."""
    return _folder_of(_resolve(path), folders) is not None


def open_beneath(path: Path, folders: Iterable[Path], limit_bytes: int = READ_LIMIT_BYTES) -> BufferedReader:
    """As `open_regular`, for a file in one of `folders`. Safe against links that change meanwhile.

    Raises:
        OSError: as `open_regular`; or the file is elsewhere.
    """
    real = _resolve(path)
    folder = _folder_of(real, folders)
    if folder is None:
        raise PermissionError(errno.EACCES, "is outside the folders to read from")
    *above, name = real.relative_to(folder).parts or (".",)
    with ExitStack() as stack:
        parent = os.open(folder, _PATH_ONLY)
        stack.callback(os.close, parent)
        for part in above:
            parent = os.open(part, _PATH_ONLY | os.O_NOFOLLOW, dir_fd=parent)
            stack.callback(os.close, parent)
        require_regular(os.stat(name, dir_fd=parent, follow_symlinks=False), limit_bytes)
        return _open_checked(os.open(name, _READ_FLAGS | os.O_NOFOLLOW, dir_fd=parent), limit_bytes)


def require_regular(status: os.stat_result, limit_bytes: int = READ_LIMIT_BYTES) -> None:
    """Checks that a file is regular and has at most `limit_bytes`.

    Raises:
        OSError: it is not; `strerror` says why.
    """
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file")
    if status.st_size > limit_bytes:
        raise OSError(errno.EOVERFLOW, f"it has {status.st_size:,} bytes, expected at most {limit_bytes:,}")


_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PATH_ONLY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def _open_checked(handle: int, limit_bytes: int) -> BufferedReader:
    try:
        require_regular(os.fstat(handle), limit_bytes)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError:  # Python 3.11 raises this for a cycle of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def _folder_of(real: Path, folders: Iterable[Path]) -> Path | None:
    return next((each for each in map(_resolve, folders) if real.is_relative_to(each)), None)
