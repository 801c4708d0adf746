"""Files that are there whole or not at all. Standard library only, so that any worker may import it."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that say that a disk is full, or has no more for us."""

SPARE_BYTES = 4_000_000
"""Disk that downloads leave for the daemon's own files."""

_PIECE_BYTES = 1024 * 1024


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
