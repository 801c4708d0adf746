"""The database of one coordinator: many readers, one writer, one commit for many writes.

A commit costs an fsync, some 2.5 ms on an ordinary disk, whatever it holds. So writes queue for one thread, which
takes all that wait, runs each in a savepoint of its own and commits them together; then each caller hears.
A write that fails takes back only itself. What a caller heard of is durable.

The writer outlives what befalls it. A server that went away is waited for, and what was surely not committed is
done again, so a write must be a function of the database alone. A commit that fails otherwise, on a full disk say,
is taken apart: every write of it gets a transaction of its own, and its own error.
"""

from __future__ import annotations

import errno
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, RootTransaction, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from coordinator import json_values
from coordinator.errors import UserError

T = TypeVar("T")
MOST_IN_ONE_COMMIT = 256
PATIENCE_SECONDS = 30.0
"""How long writes wait for a lost server, or for a foreign process that holds SQLite's lock."""

_CONNECTIONS = 40
_ENGINE_OPTIONS: dict[str, Any] = {
    "max_overflow": _CONNECTIONS - 5,
    "hide_parameters": True,  # errors are logged, values are not
    "json_serializer": json_values.dumps,  # SQLite would keep Infinity, PostgreSQL refuses it: so do we, for both
}
_SHM_SIZE = 4874  # SQLITE_IOERR_SHMSIZE: no room for the index of the write-ahead log


@dataclass(frozen=True)
class _Write:
    work: Callable[[Connection], Any]
    done: Future[Any]


@dataclass(frozen=True)
class _Outcome:
    done: Future[Any]
    value: Any = None
    failure: BaseException | None = None

    def tell(self) -> None:
        if self.failure is not None:
            self.done.set_exception(self.failure)
        else:
            self.done.set_result(self.value)


class Database:
    """An open database. `write` from any thread or coroutine; close it to stop the writer."""

    def __init__(self, url: str, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.engine = open_engine(url)
        self._writing = self.engine.execution_options(writing=True)
        self._patience_seconds = patience_seconds
        self.on_commit: Callable[[int], None] = lambda writes: None
        """Hears, in the writer's thread, how many writes each commit carried."""
        self._pending: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._door = threading.Lock()
        self._writer = threading.Thread(target=self._serve, name="database-writer", daemon=True)
        self._writer.start()

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, in a transaction that only reads."""
        with self.engine.connect() as connection:
            return work(connection)

    def write(self, work: Callable[[Connection], T]) -> Future[T]:
        """The result of `work` once it is durable; its own exception if it raised, and nothing of it is kept.

        `await asyncio.wrap_future(...)` in a coroutine, `.result()` in a thread. Writes are done in the order
        of the calls, one at a time, so a write may read what it decides on. `work` may be called more than
        once; one whose future was cancelled before its turn is not done.

        Raises:
            RuntimeError: the database is closed.
        """
        done: Future[T] = Future()
        with self._door:
            if self._closing.is_set():
                raise RuntimeError("the database is closed")
            self._pending.put(_Write(work, done))
        return done

    def close(self) -> None:
        """Finishes what was asked for and lets go of the database."""
        with self._door:
            self._closing.set()
            self._pending.put(None)
        self._writer.join()
        self.engine.dispose()

    def _serve(self) -> None:
        ended = False
        while not ended:
            batch: list[_Write] = []
            entry = self._pending.get()
            while entry is not None:
                if entry.done.set_running_or_notify_cancel():
                    batch.append(entry)
                if len(batch) == MOST_IN_ONE_COMMIT or self._pending.empty():
                    break
                entry = self._pending.get()
            ended = entry is None
            if batch:
                self._commit(batch)

    def _commit(self, batch: Sequence[_Write]) -> None:
        """Every write is told how it ended, whatever happens."""
        try:
            outcomes = self._patiently(batch)
        except BaseException as error:
            if len(batch) > 1 and not _passing(error):
                for write in batch:
                    self._commit([write])
                return
            outcomes = [_Outcome(write.done, failure=error) for write in batch]
        self.on_commit(len(batch))
        for outcome in outcomes:
            outcome.tell()

    def _patiently(self, batch: Sequence[_Write]) -> list[_Outcome]:
        """The outcomes of a committed transaction; tried again while the reason against it may pass."""
        give_up = time.monotonic() + self._patience_seconds
        pause_seconds = 0.05
        while True:
            try:
                return self._transaction(batch, give_up)
            except DBAPIError as error:
                if not _passing(error) or time.monotonic() > give_up:
                    raise
            self._closing.wait(pause_seconds)
            if self._closing.is_set():
                give_up = min(give_up, time.monotonic() + 1)
                time.sleep(pause_seconds)
            pause_seconds = min(1.0, pause_seconds * 2)

    def _transaction(self, batch: Sequence[_Write], give_up: float) -> list[_Outcome]:
        with self._writing.connect() as connection:
            try:
                transaction = connection.begin()
                outcomes = [_attempt(connection, write) for write in batch]
                identity = _transaction_id(connection)
                self._finish(transaction, identity, give_up)
            except BaseException:
                connection.invalidate()  # whatever state it is in: the next transaction gets a new one
                raise
            return outcomes

    def _finish(self, transaction: RootTransaction, identity: str | None, give_up: float) -> None:
        try:
            transaction.commit()
        except DBAPIError as error:
            # The line broke while the server was committing: it did or it did not, and it can say which.
            if identity is None or not error.connection_invalidated:
                raise
            if not self._was_committed(identity, give_up):
                raise

    def _was_committed(self, identity: str, give_up: float) -> bool:
        """Whether PostgreSQL committed the transaction of this id; asked until it answers."""
        while True:
            try:
                with self.engine.connect() as connection:
                    status = connection.execute(
                        text("SELECT pg_xact_status(CAST(:id AS xid8))"), {"id": identity}
                    ).scalar_one()
                if status != "in progress":
                    return bool(status == "committed")
            except DBAPIError as error:
                if not _passing(error) or time.monotonic() > give_up:
                    raise
            time.sleep(0.1)


def is_disk_full(error: BaseException) -> bool:
    """Whether this came from a disk without room; nothing of the write was kept, and it may be tried again later."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_FULL, _SHM_SIZE)
    if isinstance(error, psycopg.Error):
        return isinstance(error, psycopg.errors.DiskFull)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def open_engine(url: str) -> Engine:
    """An engine for SQLite or PostgreSQL, by its URL. Connects to nothing yet.

    Raises:
        UserError: the URL is of no database that we use.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "postgresql":
        return create_engine(parsed, pool_pre_ping=True, **_ENGINE_OPTIONS)
    engine = create_engine(
        parsed,
        connect_args={"timeout": PATIENCE_SECONDS, "check_same_thread": False},
        **_ENGINE_OPTIONS,
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        # The driver begins transactions late and by its own rules, which breaks savepoints; we begin ourselves.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # Who will write takes the lock first: a lock taken halfway is refused where another process wrote since.
        writing = connection.get_execution_options().get("writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _parsed(url: str) -> URL:
    example = "expected sqlite:////path/to/file.db or postgresql://user@host/database"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UserError(f"the database URL is none; {example}") from None  # it may hold a password: not shown
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise UserError(f"databases of kind {parsed.drivername!r} are not supported; {example}")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise UserError(f"a coordinator's database cannot be in memory; {example}")
    return parsed


def _attempt(connection: Connection, write: _Write) -> _Outcome:
    """One write in its savepoint. Its own failure is an outcome; the end of the whole transaction is raised."""
    savepoint = connection.begin_nested()
    try:
        value = write.work(connection)
        savepoint.commit()
    except BaseException as error:
        if _transaction_is_lost(connection):
            raise
        savepoint.rollback()
        return _Outcome(write.done, failure=error)
    return _Outcome(write.done, value)


def _transaction_is_lost(connection: Connection) -> bool:
    if connection.closed or connection.invalidated:
        return True
    # SQLite may give up a transaction as a whole (full disk); then a savepoint would begin and commit one of its own.
    driver: Any = connection.connection.dbapi_connection
    return isinstance(driver, sqlite3.Connection) and not driver.in_transaction


def _transaction_id(connection: Connection) -> str | None:
    """PostgreSQL's id of the current transaction, if it has written anything."""
    if connection.dialect.name != "postgresql":
        return None
    found = connection.execute(text("SELECT CAST(pg_current_xact_id_if_assigned() AS text)")).scalar_one()
    return None if found is None else str(found)


def _passing(error: BaseException) -> bool:
    """The server cannot be reached, or somebody else holds the lock: nothing was committed, and that may change."""
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", 0)
        return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return error.connection_invalidated or (isinstance(error, OperationalError) and _unreachable(error.orig))


def _unreachable(error: BaseException | None) -> bool:
    """No answer, or one of the classes 08 (connection), 57P (server going down or coming up), 53300 (too many)."""
    state = getattr(error, "sqlstate", None)
    return isinstance(error, psycopg.OperationalError) and (
        state is None or state.startswith(("08", "57P")) or state == "53300"
    )
