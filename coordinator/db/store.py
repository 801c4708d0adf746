"""The database of one coordinator: many readers, one writer, one commit for many writes.

A commit costs an fsync, about 2.5 ms on an ordinary disk, whatever its size. So writes queue for one thread, which takes
all that wait, runs each in its own savepoint, commits them together and then resolves their futures. A failed write
rolls back only its own savepoint. Once acknowledged, a write is durable.

The writer survives failures. It waits for a server that is unreachable and repeats what was certainly not committed, so
a write must be a function of the database alone. If a commit fails for another reason, such as a full disk, each of its
writes is retried in a transaction of its own and gets its own error.

`require_intact` checks at start that the database is intact and belongs to this home. Without it, a page that the disk has
zeroed would show in the middle of a round, or never, and an emptied database would get new tables and a fleet that it does
not know.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, RootTransaction, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from coordinator import json_values
from coordinator.db import project_filter
from coordinator.errors import UserError
from coordinator.storage.errors import is_damaged_database, is_temporary

T = TypeVar("T")
MAX_WRITES_PER_COMMIT = 256
PATIENCE_SECONDS = 30.0
"""How long writes wait for an unreachable server, or for a lock that another process holds."""

_CONNECTIONS = 40
_ENGINE_OPTIONS: dict[str, Any] = {
    "max_overflow": _CONNECTIONS - 5,
    "hide_parameters": True,  # errors are logged, values are not
    "json_serializer": json_values.dumps,  # refuses Infinity, as PostgreSQL does and SQLite does not
}

_BESIDE = ("blobs", "runs")
"""Folders of the home whose contents a database refers to."""


@dataclass(frozen=True)
class _Write:
    work: Callable[[Connection], Any]
    done: Future[Any]
    project: str | None


@dataclass(frozen=True)
class _Outcome:
    done: Future[Any]
    value: Any = None
    failure: BaseException | None = None

    def resolve(self) -> None:
        if self.failure is not None:
            self.done.set_exception(self.failure)
        else:
            self.done.set_result(self.value)


class Database:
    """An open database. `write` may be called from any thread or coroutine; `close` stops the writer."""

    def __init__(self, url: str, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.engine = open_engine(url)
        self._project: str | None = None
        self._writing = self.engine.execution_options(writing=True)
        self._patience_seconds = patience_seconds
        self.on_commit: Callable[[int], None] = lambda writes: None
        """Called in the writer's thread with the number of writes in each commit."""
        self._pending: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._writer = threading.Thread(target=self._serve, name="database-writer", daemon=True)
        self._writer.start()

    def read(self, work: Callable[[Connection], T]) -> T:
        """The result of `work`, run in a read-only transaction."""
        with self.engine.connect() as connection, project_filter.working_for(connection, self._project):
            return work(connection)

    def write(self, work: Callable[[Connection], T]) -> Future[T]:
        """A future of the result of `work`, resolved once it is durable; if `work` raises, it is rolled back.

        Use `await asyncio.wrap_future(...)` in a coroutine, `.result()` in a thread. Writes run in the order of the
        calls, one at a time, so a write may read what it decides on. `work` may be called more than once; it is skipped
        if its future was cancelled before.

        Raises:
            RuntimeError: the database is closed.
        """
        done: Future[T] = Future()
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("the database is closed")
            self._pending.put(_Write(work, done, self._project))
        return done

    def of_project(self, project: str) -> Database:
        """The same database, with its one writer, as a project sees it: see `coordinator.db.project_filter`."""
        view = copy(self)
        view._project = project
        return view

    def close(self) -> None:
        """Finishes all pending writes and closes the database."""
        with self._lock:
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
                if len(batch) == MAX_WRITES_PER_COMMIT or self._pending.empty():
                    break
                entry = self._pending.get()
            ended = entry is None
            if batch:
                self._commit(batch)

    def _commit(self, batch: Sequence[_Write]) -> None:
        """Commits the writes and resolves every future, whatever happens."""
        try:
            outcomes = self._commit_with_retries(batch)
        except BaseException as error:
            if len(batch) > 1 and not _is_temporary(error):
                for write in batch:
                    self._commit([write])
                return
            outcomes = [_Outcome(write.done, failure=error) for write in batch]
        self.on_commit(len(batch))
        for outcome in outcomes:
            outcome.resolve()

    def _commit_with_retries(self, batch: Sequence[_Write]) -> list[_Outcome]:
        """The outcomes of a committed transaction, retried on temporary errors."""
        give_up = time.monotonic() + self._patience_seconds
        pause_seconds = 0.05
        while True:
            try:
                return self._transaction(batch, give_up)
            except DBAPIError as error:
                if not _is_temporary(error) or time.monotonic() > give_up:
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
                connection.invalidate()  # its state is unknown: the next transaction gets a new one
                raise
            return outcomes

    def _finish(self, transaction: RootTransaction, identity: str | None, give_up: float) -> None:
        try:
            transaction.commit()
        except DBAPIError as error:
            # The connection broke during the commit; the server knows whether it succeeded.
            if identity is None or not error.connection_invalidated:
                raise
            if not self._was_committed(identity, give_up):
                raise

    def _was_committed(self, identity: str, give_up: float) -> bool:
        """Whether PostgreSQL committed the transaction with this id; queried until the server answers."""
        while True:
            try:
                with self.engine.connect() as connection:
                    status = connection.execute(
                        text("SELECT pg_xact_status(CAST(:id AS xid8))"), {"id": identity}
                    ).scalar_one()
                if status != "in progress":
                    return bool(status == "committed")
            except DBAPIError as error:
                if not _is_temporary(error) or time.monotonic() > give_up:
                    raise
            time.sleep(0.1)


def open_engine(url: str) -> Engine:
    """An engine for SQLite or PostgreSQL, not connected yet. Connections that work for a project see only that.

    Raises:
        UserError: the URL is invalid, or names another kind of database.
    """
    parsed = _parsed(url)
    engine = _connector(parsed)
    project_filter.install(engine)
    return engine


def _connector(parsed: URL) -> Engine:
    if parsed.get_backend_name() == "postgresql":
        engine = create_engine(parsed, pool_pre_ping=True, **_ENGINE_OPTIONS)

        @event.listens_for(engine, "connect")
        def _limit(connection: Any, record: Any) -> None:
            # PostgreSQL would wait for a lock for ever. Not set in the URL's options, which belong to the user.
            connection.execute(f"SET lock_timeout = {int(PATIENCE_SECONDS * 1000)}")
            connection.commit()

        return engine
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
        # A writer takes the lock first: SQLite refuses to upgrade a read lock if another process wrote since.
        writing = connection.get_execution_options().get("writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _parsed(url: str) -> URL:
    example = "expected sqlite:////path/to/file.db or postgresql://user@host/database"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UserError(f"invalid database URL; {example}") from None  # not shown: it may hold a password
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise UserError(f"databases of kind {parsed.drivername!r} are not supported; {example}")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise UserError(f"a coordinator's database cannot be in memory; {example}")
    return parsed


def _attempt(connection: Connection, write: _Write) -> _Outcome:
    """One write in its savepoint. Its own failure is an outcome; a lost transaction is raised."""
    savepoint = connection.begin_nested()
    try:
        with project_filter.working_for(connection, write.project):
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
    # SQLite may roll back the entire transaction (full disk); then a savepoint would begin and commit one of its own.
    driver: Any = connection.connection.dbapi_connection
    return isinstance(driver, sqlite3.Connection) and not driver.in_transaction


def _transaction_id(connection: Connection) -> str | None:
    """PostgreSQL's id of the current transaction, if it has written anything."""
    if connection.dialect.name != "postgresql":
        return None
    identity = connection.execute(text("SELECT CAST(pg_current_xact_id_if_assigned() AS text)")).scalar_one()
    return None if identity is None else str(identity)


def _is_temporary(error: BaseException) -> bool:
    """Whether the server is unreachable or another process holds the lock; nothing was committed, a retry may succeed."""
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", 0)
        return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return error.connection_invalidated or (isinstance(error, OperationalError) and _unreachable(error.orig))


def _unreachable(error: BaseException | None) -> bool:
    """No answer, or one of the classes 08 (connection), 57P (server going down or coming up), 53300 (too many), 55P03 (lock)."""
    state = getattr(error, "sqlstate", None)
    return isinstance(error, psycopg.OperationalError) and (
        state is None or state.startswith(("08", "57P")) or state in ("53300", "55P03")
    )


def require_intact(database_url: str, home: Path) -> None:
    """Checks a SQLite database for damage (`PRAGMA quick_check`), and a database of either kind for lost tables.

    Raises:
        UserError: it is damaged, or has no tables although the home holds blobs or runs. Nothing was changed.
    """
    engine = open_engine(database_url)
    where = engine.url.render_as_string(hide_password=True)
    beside = _used_folder(home)
    try:
        file = Path(str(make_url(database_url).database))
        if engine.dialect.name == "sqlite" and (not file.exists() or file.stat().st_size == 0):
            # Not opened: SQLite would remove the write-ahead log of an empty file.
            if beside:
                raise _emptied(where, beside)
            return
        with engine.connect() as connection:
            damage = _damage(connection)
            if damage is not None:
                raise _damaged(where, damage)
            if beside and not inspect(connection).get_table_names():
                raise _emptied(where, beside)
    except DBAPIError as error:
        if is_damaged_database(error):
            raise _damaged(where, str(error.orig)) from None
        if not is_temporary(error):
            raise
        # `migrate`, which opens the database too, reports it
    finally:
        engine.dispose()


def _damage(connection: Connection) -> str | None:
    """The damage that SQLite finds in its file; None if there is none. PostgreSQL checks its own files."""
    if connection.dialect.name != "sqlite":
        return None
    findings = connection.execute(text("PRAGMA quick_check(3)")).scalars().all()
    return None if findings == ["ok"] else " ".join("; ".join(findings).split())[:300]


def _used_folder(home: Path) -> Path | None:
    """A folder of the home whose contents a database refers to; None if all are empty."""
    for name in _BESIDE:
        folder = home / name
        if folder.is_dir() and any(not each.name.startswith(".") for each in folder.iterdir()):
            return folder
    return None


def _damaged(where: str, damage: str) -> UserError:
    return UserError(
        f"the database {where} is damaged: {damage}; nothing was changed. Check the disk, then restore the database and its "
        "-wal file from the last backup of the home; without one, `sqlite3 OLD .recover | sqlite3 NEW` saves what can be read"
    )


def _emptied(where: str, beside: Path) -> UserError:
    return UserError(
        f"the database {where} has no tables, but {beside} holds files that belong to a database: it was emptied or lost, or "
        "is another one. Nothing was changed. Restore it from the last backup, or set FEDLOOP_DATABASE_URL to the right one; "
        f"to start afresh instead, move {' and '.join(_BESIDE)} out of {beside.parent}"
    )
