"""Errors of disks and databases: whether they are temporary, and their remedy.

A folder that is read-only, full, missing or inaccessible, a disk that does not respond, a database that is locked or
unreachable: these are repaired outside this process, which waits. Damage is permanent.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import psycopg
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from coordinator.errors import StorageFailed
from edge_client.files import NO_ROOM

_SHM_SIZE = 4874  # SQLITE_IOERR_SHMSIZE: no room for the index of the write-ahead log

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_REMEDIES = {
    errno.EROFS: "mount it writable again",
    errno.EACCES: "give the coordinator's user access to it",
    errno.EPERM: "give the coordinator's user access to it",
    errno.EIO: "check the disk and its cables: the kernel's log says more",
    errno.ENOENT: "mount it, or put it back",
    errno.ENOTDIR: "put the folder back",
    errno.ESTALE: "mount it again",
    errno.ENODEV: "mount it again",
    errno.ENXIO: "mount it again",
    errno.ENOTCONN: "mount it again",
    errno.ETIMEDOUT: "see why the file server does not answer",
    errno.EMFILE: "raise the limit of open files",
    errno.ENFILE: "raise the system's limit of open files",
}
_MAKE_ROOM = "free some space there"


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk is full; nothing of the write was kept, and it can be retried later."""
    error = _original(error)
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in (sqlite3.SQLITE_FULL, _SHM_SIZE)
    if isinstance(error, psycopg.Error):
        return isinstance(error, psycopg.errors.DiskFull)
    return isinstance(error, OSError | StorageFailed) and error.errno in NO_ROOM


def is_temporary(error: BaseException) -> bool:
    """Whether the error ends once somebody repairs the disk or the database."""
    if isinstance(error, DBAPIError):
        return isinstance(error, OperationalError) or error.connection_invalidated or is_disk_full(error)
    if isinstance(error, OSError | StorageFailed):
        return error.errno in _REMEDIES or error.errno in NO_ROOM
    return isinstance(error, PoolTimeout)


def is_damaged_database(error: BaseException) -> bool:
    """Whether SQLite reports that the database file is damaged."""
    original = _original(error)
    return isinstance(original, sqlite3.Error) and _sqlite_code(original) & 0xFF in _DAMAGED


def describe(error: BaseException, home: Path) -> str:
    """The place, name and remedy of a temporary error (`is_temporary`)."""
    original = _original(error)
    if isinstance(original, StorageFailed):
        return f"{original} ({errno.errorcode.get(original.errno, '')}); {remedy(error)}"
    if not isinstance(original, OSError):
        what = " ".join(str(original).split())[:300] or type(original).__name__
        return f"the database: {what}; {remedy(error)}"
    name = errno.errorcode.get(original.errno or 0, "")
    where = str(
        original.filename2 or original.filename or f"a file in {home}"
    )  # a failed write does not say to which
    return f"{where}: {original.strerror} ({name}); {remedy(error)}"


def remedy(error: BaseException) -> str:
    """What an operator can do about the error."""
    if is_disk_full(error):
        return _MAKE_ROOM
    original = _original(error)
    if isinstance(original, OSError | StorageFailed):
        return _REMEDIES.get(original.errno or 0, "make it readable and writable")
    if _is_locked(original):
        return "end the other process that holds its lock"
    if isinstance(original, sqlite3.Error):
        return "make its file and folder readable and writable"
    return "check that its server runs, is reachable and admits this user"


def _is_locked(error: BaseException) -> bool:
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return isinstance(error, psycopg.errors.LockNotAvailable)


def _original(error: BaseException) -> BaseException:
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error


def _sqlite_code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0))
