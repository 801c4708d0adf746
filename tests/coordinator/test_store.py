"""The database's writer: what a caller heard of is durable, and nothing that befalls one write harms another."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, event, func, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, StatementError

from coordinator.db import events
from coordinator.db.store import Database
from coordinator.db.tables import certificates, serials
from coordinator.storage.errors import is_disk_full
from edge_client.processes.process import worker_environment
from tests.support.databases import postgres, with_tables

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def row(name: str) -> Callable[[Connection], str]:
    def work(connection: Connection) -> str:
        connection.execute(insert(serials).values(serial_number=name, device_group="g", added_at=NOON))
        return name

    return work


def names(database: Database) -> set[str]:
    return database.read(lambda connection: set(connection.scalars(select(serials.c.serial_number))))


@contextmanager
def held_up(database: Database) -> Iterator[None]:
    """The writer is busy with a write of its own meanwhile, so that others queue."""
    begun, go = threading.Event(), threading.Event()

    def busy(connection: Connection) -> None:
        begun.set()
        assert go.wait(30)

    waiting = database.write(busy)
    assert begun.wait(30)
    try:
        yield
    finally:
        go.set()
        waiting.result(30)


def commits(database: Database) -> list[None]:
    """Grows by one with every commit from now on."""
    seen: list[None] = []
    event.listen(database.engine, "commit", lambda connection: seen.append(None))
    return seen


def test_many_writes_share_one_commit(database: Database) -> None:
    with held_up(database):
        seen = commits(database)
        waiting = [database.write(row(f"s{i}")) for i in range(200)]
    assert [each.result(30) for each in waiting] == [f"s{i}" for i in range(200)]
    assert len(names(database)) == 200
    assert len(seen) == 2  # the one that held them up, and theirs


def test_writers_in_many_threads_need_far_fewer_commits_than_writes(database: Database) -> None:
    seen = commits(database)
    start = threading.Barrier(32)

    def work(thread: int) -> None:
        start.wait()
        for i in range(10):
            database.write(row(f"{thread}/{i}")).result(30)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(database)) == 320
    assert len(seen) <= 160


def test_a_write_that_fails_takes_back_only_itself(database: Database) -> None:
    def fails(connection: Connection) -> None:
        row("half")(connection)
        raise LookupError("changed my mind")

    with held_up(database):
        first = database.write(row("a"))
        wrong = database.write(fails)
        again = database.write(row("a"))
        last = database.write(row("b"))
    assert (first.result(30), last.result(30)) == ("a", "b")
    with pytest.raises(LookupError, match="changed my mind"):
        wrong.result(30)
    with pytest.raises(IntegrityError):
        again.result(30)
    assert names(database) == {"a", "b"}


def test_a_write_that_swallows_an_error_of_the_database_harms_no_other(database: Database) -> None:
    def swallows(connection: Connection) -> None:
        row("kept?")(connection)
        with pytest.raises(IntegrityError):
            row("a")(connection)

    with held_up(database):
        waiting = [database.write(work) for work in (row("a"), swallows, row("b"))]
    assert (waiting[0].result(30), waiting[2].result(30)) == ("a", "b")
    # PostgreSQL takes the whole write back and says so, SQLite only its failed statement.
    kept = {"kept?"} if waiting[1].exception(30) is None else set()
    assert names(database) == {"a", "b"} | kept


def test_a_commit_that_fails_is_taken_apart(database_url: str) -> None:
    with_tables(database_url)
    database = Database(database_url)
    refused: list[int] = []

    def refuse(connection: Connection) -> None:
        if connection.scalar(
            select(func.count()).select_from(serials).where(serials.c.serial_number == "bad")
        ):
            refused.append(1)
            raise ValueError("this commit cannot be")

    event.listen(database.engine, "commit", refuse)
    with held_up(database):
        waiting = [database.write(row(name)) for name in ("a", "bad", "b")]
    assert (waiting[0].result(30), waiting[2].result(30)) == ("a", "b")
    with pytest.raises(ValueError, match="cannot be"):
        waiting[1].result(30)
    assert names(database) == {"a", "b"}
    assert len(refused) == 2
    database.close()


def test_a_caller_that_stopped_waiting_stops_nothing_else(database: Database) -> None:
    async def impatient() -> Future[str]:
        waiting = database.write(row("never"))
        task = asyncio.ensure_future(asyncio.wrap_future(waiting))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return waiting

    with held_up(database):
        cancelled = asyncio.run(impatient())
        other = database.write(row("b"))
    assert cancelled.cancelled()
    assert other.result(30) == "b"
    assert names(database) == {"b"}


def test_a_caller_that_stops_waiting_for_a_write_in_progress_leaves_it_done(database: Database) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(connection: Connection) -> str:
        begun.set()
        assert go.wait(30)
        return row("slow")(connection)

    waiting = database.write(slow)
    assert begun.wait(30)
    assert not waiting.cancel()
    go.set()
    assert waiting.result(30) == "slow"
    assert names(database) == {"slow"}


def test_even_an_exit_within_a_write_leaves_the_writer_alive(database: Database) -> None:
    def leaves(connection: Connection) -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        database.write(leaves).result(30)
    assert database.write(row("a")).result(30) == "a"


def test_foreign_keys_hold(database: Database) -> None:
    orphan: dict[str, Any] = {
        "serial": "1",
        "device": "nobody",
        "pem": "",
        "key_sha256": "",
        "not_before": NOON,
        "not_after": NOON,
    }
    with pytest.raises(IntegrityError):
        database.write(lambda connection: connection.execute(insert(certificates).values(orphan))).result(30)


def test_a_closed_database_finishes_pending_writes_and_takes_no_more(database_url: str) -> None:
    with_tables(database_url)
    database = Database(database_url)
    waiting = [database.write(row(f"s{i}")) for i in range(50)]
    database.close()
    assert [each.result(0) for each in waiting] == [f"s{i}" for i in range(50)]
    with pytest.raises(RuntimeError, match="closed"):
        database.write(row("late"))


def sqlite_database(folder: Path, **options: Any) -> Database:
    url = f"sqlite:///{folder}/fedloop.db"
    with_tables(url)
    return Database(url, **options)


def test_a_lock_held_by_another_process_is_waited_for(tmp_path: Path) -> None:
    database = sqlite_database(tmp_path)
    other = sqlite3.connect(tmp_path / "fedloop.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    waiting = database.write(row("a"))
    assert not waiting.done()
    other.execute("COMMIT")
    assert waiting.result(30) == "a"
    other.close()
    database.close()


def test_a_lock_that_is_never_given_back_ends_in_an_error_and_the_writer_lives_on(tmp_path: Path) -> None:
    database = sqlite_database(tmp_path, patience_seconds=0.0)

    @event.listens_for(database.engine, "checkout")
    def no_timeout(connection: Any, record: Any, proxy: Any) -> None:
        connection.execute("PRAGMA busy_timeout=10")

    other = sqlite3.connect(tmp_path / "fedloop.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OperationalError, match="locked"):
        database.write(row("a")).result(30)
    other.execute("COMMIT")
    assert database.write(row("b")).result(30) == "b"
    assert names(database) == {"b"}
    other.close()
    database.close()


def test_a_full_sqlite_database_refuses_what_does_not_fit_and_recovers(tmp_path: Path) -> None:
    database = sqlite_database(tmp_path)

    def limit(pages: int) -> None:
        def set_limit(connection: Any, record: Any, proxy: Any) -> None:
            connection.execute(f"PRAGMA max_page_count={pages}")

        event.listen(database.engine, "checkout", set_limit)

    used = database.read(lambda connection: connection.scalar(text("PRAGMA page_count")))
    limit(used + 3)
    with held_up(database):
        waiting = [database.write(work) for work in (row("a"), row("x" * 60_000), row("b"))]
    assert (waiting[0].result(30), waiting[2].result(30)) == ("a", "b")
    error = waiting[1].exception(30)
    assert error is not None and is_disk_full(error)
    assert names(database) == {"a", "b"}
    limit(1_000_000)
    assert database.write(row("y" * 60_000)).result(30) == "y" * 60_000
    database.close()


def test_a_transaction_that_sqlite_gave_up_is_not_half_kept(tmp_path: Path) -> None:
    """A full disk may end the transaction of the whole batch; a savepoint after it would commit by itself."""
    database = sqlite_database(tmp_path)
    calls: list[int] = []

    def given_up(connection: Connection) -> None:
        calls.append(1)
        driver: Any = connection.connection.dbapi_connection
        driver.execute("ROLLBACK")
        raise LookupError("as a full disk does it")

    with held_up(database):
        waiting = [database.write(work) for work in (row("a"), given_up, row("b"))]
    assert (waiting[0].result(30), waiting[2].result(30)) == ("a", "b")
    with pytest.raises(LookupError):
        waiting[1].result(30)
    assert names(database) == {"a", "b"}
    assert len(calls) == 2
    database.close()


def test_errors_of_a_full_disk_are_recognised() -> None:
    assert is_disk_full(OSError(28, "No space left on device"))
    assert is_disk_full(DBAPIError("INSERT", {}, psycopg.errors.DiskFull("could not extend file")))
    assert not is_disk_full(OSError(13, "Permission denied"))
    assert not is_disk_full(IntegrityError("INSERT", {}, sqlite3.IntegrityError("UNIQUE")))


@pytest.fixture
def on_postgres() -> Iterator[Database]:
    url = postgres().create()
    with_tables(url)
    database = Database(url)
    yield database
    database.close()
    postgres().drop(url)


def test_a_server_that_ends_all_connections_is_written_to_all_the_same(on_postgres: Database) -> None:
    on_postgres.write(row("a")).result(30)
    postgres().cut_connections()
    assert on_postgres.write(row("b")).result(30) == "b"
    assert names(on_postgres) == {"a", "b"}


def test_a_connection_lost_between_two_writes_of_a_batch_loses_neither(on_postgres: Database) -> None:
    cut: list[int] = []

    def cuts(connection: Connection) -> None:
        if not cut:
            cut.append(1)
            postgres().cut_connections()

    with held_up(on_postgres):
        waiting = [on_postgres.write(work) for work in (row("a"), cuts, row("b"))]
    assert (waiting[0].result(30), waiting[2].result(30)) == ("a", "b")
    assert names(on_postgres) == {"a", "b"}


@pytest.mark.parametrize("reached_the_server", [True, False])
def test_a_connection_lost_in_the_commit_itself_is_cleared_up(
    on_postgres: Database, reached_the_server: bool
) -> None:
    """Whether the server did commit or not, the row is there once and the caller hears so."""
    cut: list[int] = []

    @event.listens_for(on_postgres.engine, "commit")
    def cuts(connection: Connection) -> None:
        if not cut:
            cut.append(1)
            if reached_the_server:
                driver: Any = connection.connection.dbapi_connection
                driver.commit()
            postgres().cut_connections()

    calls: list[int] = []

    def counted(connection: Connection) -> str:
        calls.append(1)
        return row("once")(connection)

    assert on_postgres.write(counted).result(30) == "once"
    assert names(on_postgres) == {"once"}
    assert len(calls) == (1 if reached_the_server else 2)


def acknowledged_before_the_kill(url: str, kills: int, rng: random.Random) -> set[str]:
    received: set[str] = set()
    for life in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.acknowledging_writer", url, "8", str(life * 1_000_000)],
            stdout=subprocess.PIPE,
            env=worker_environment(),
        )
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 200)):
            received.add(process.stdout.readline().decode().strip())
        os.kill(process.pid, signal.SIGKILL)
        rest, _ = process.communicate()
        received.update(line for line in rest.decode().split("\n")[:-1])
    return received


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_an_acknowledged_write_survives_kill_9(kind: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fedloop.db" if kind == "sqlite" else postgres().create()
    with_tables(url)
    result = acknowledged_before_the_kill(url, 5 if kind == "sqlite" else 2, random.Random(7))
    database = Database(url)
    assert "" not in result and len(result) > 20
    assert result <= names(database)
    database.close()
    if kind == "postgresql":
        postgres().drop(url)


def test_json_without_a_word_for_it_is_refused_by_both_databases_and_events_tell_null(
    database: Database,
) -> None:
    def written(connection: Connection) -> None:
        connection.execute(
            insert(events.events).values(time=NOON, event="x", **{"values": {"loss": math.inf}})
        )

    with pytest.raises((StatementError, ValueError), match="not JSON compliant"):
        database.write(written).result()

    figures = {"loss": math.inf, "sites": {"a": [math.nan, -math.inf, 1]}}
    database.write(lambda at: events.record(at, NOON, "scored", **figures)).result()
    (row,) = database.read(lambda at: events.since(at, 0, 10))
    assert row.values == {"loss": None, "sites": {"a": [None, None, 1]}}
