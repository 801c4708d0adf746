"""Private folders, in which a command keeps rows of data and other temporary files of its own.

A private folder lies in the system's folder for temporary files (`TMPDIR`), is accessible to its user only (0700), and is
removed at the end, whether the command succeeded or failed. Its creator holds a lock on it, which the kernel releases
when the process ends in any way; creating a private folder first removes those that killed processes left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "fedloop-private-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new private folder, removed on exit; those of killed processes are removed first."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    path, lock = _create()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _create() -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = _try_lock(path)
        except FileNotFoundError:
            lock = None
        # Another process may have removed it as abandoned before it was locked.
        if lock is not None and path.exists():
            return path, lock
        if lock is not None:
            os.close(lock)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if another process holds it."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _remove_abandoned(root: Path) -> None:
    """Removes this user's private folders that no process holds."""
    for path in root.glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue
            lock = _try_lock(path)
        except OSError:
            continue  # it is gone, or not ours
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
