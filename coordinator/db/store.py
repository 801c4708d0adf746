"""The database of one coordinator: many readers, one writer, one commit for many writes.

A commit costs an fsync, some 2.5 ms on an ordinary disk, whatever it holds. So writes queue for one thread, which
takes all that wait, runs each in a savepoint of its own and commits them together; then each caller hears.
A write that fails takes back only itself. What a caller heard of is durable.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url

T = TypeVar("T")
MOST_IN_ONE_COMMIT = 256


@dataclass(frozen=True)
class _Write:
    work: Callable[[Connection], Any]
    done: Future[Any]


class Database:
    """An open database. `write` from any thread or coroutine; close it to stop the writer."""

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self._pending: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._serve, name="database-writer", daemon=True)
        self._writer.start()

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, in a transaction that only reads."""
        with self.engine.connect() as connection:
            return work(connection)

    def write(self, work: Callable[[Connection], T]) -> Future[T]:
        """The result of `work` once it is durable; its own exception if it raised, and nothing of it is kept.

        `await asyncio.wrap_future(...)` in a coroutine, `.result()` in a thread. Writes are done in the order
        of the calls, one at a time, so a write may read what it decides on.
        """
        done: Future[T] = Future()
        self._pending.put(_Write(work, done))
        return done

    def close(self) -> None:
        """Finishes what was asked for and lets go of the database."""
        self._pending.put(None)
        self._writer.join()
        self.engine.dispose()

    def _serve(self) -> None:
        ended = False
        while not ended:
            batch: list[_Write] = []
            entry = self._pending.get()
            while entry is not None:
                batch.append(entry)
                if len(batch) == MOST_IN_ONE_COMMIT or self._pending.empty():
                    break
                entry = self._pending.get()
            ended = entry is None
            if batch:
                self._commit(batch)

    def _commit(self, batch: list[_Write]) -> None:
        outcomes: list[tuple[Future[Any], Any, Exception | None]] = []
        try:
            with self.engine.begin() as connection:
                for write in batch:
                    outcomes.append(_attempt(connection, write))
        except Exception as error:  # the commit itself: full disk, lost server
            outcomes = [(write.done, None, error) for write in batch]
        for done, value, failure in outcomes:
            if failure is not None:
                done.set_exception(failure)
            else:
                done.set_result(value)


def _attempt(connection: Connection, write: _Write) -> tuple[Future[Any], Any, Exception | None]:
    try:
        with connection.begin_nested():
            return write.done, write.work(connection), None
    except Exception as error:
        if connection.closed or connection.invalidated:
            raise
        return write.done, None, error


def _engine(url: str) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": 30, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        # The driver begins transactions late and by its own rules, which breaks savepoints; we begin ourselves.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine
