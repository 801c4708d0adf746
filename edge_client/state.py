"""The daemon's durable state: one SQLite file in its state folder, durable at every commit.

    flags       such as paused, set by commands while the daemon runs
    opted_out   runs that this device takes no part in
    task        the one task in hand
    runs        runs it worked for, so that their files can be deleted when they are over
    own_models  the last task of each run that leaves a model of the device's own here
    outbox      finished results to deliver (`edge_client.outbox`)
    ledger      what left the device (`edge_client.outbox`)

The daemon and the commands open it at the same time; each change is a separate transaction.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from edge_client.errors import UserError
from edge_client.files import NO_ROOM
from edge_client.wire.device import TaskOffer, to_json
from edge_client.wire.strict import InvalidDocument, parse_message

_LOCK_SECONDS = 0.5
"""Longer than `daemon_pid` holds the lock."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS flags (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS opted_out (run TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS task (one INTEGER PRIMARY KEY CHECK (one = 1), offer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, used_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS run_blobs (run TEXT, sha256 TEXT, PRIMARY KEY (run, sha256)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS own_models (run TEXT PRIMARY KEY, offer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outbox (
    task TEXT PRIMARY KEY, run TEXT NOT NULL, run_name TEXT NOT NULL, round INTEGER NOT NULL,
    kind TEXT NOT NULL, size_bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, decoded_bytes INTEGER NOT NULL,
    encoding TEXT NOT NULL, stored_at REAL NOT NULL, closes_at REAL NOT NULL, treated TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, task TEXT NOT NULL, run TEXT NOT NULL,
    run_name TEXT NOT NULL, round INTEGER NOT NULL, kind TEXT NOT NULL, size_bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL, encoding TEXT NOT NULL, treated TEXT NOT NULL, UNIQUE (task, sha256)
);
CREATE TABLE IF NOT EXISTS ledger_outcomes (
    entry INTEGER NOT NULL REFERENCES ledger (id), at REAL NOT NULL, outcome TEXT NOT NULL
);
CREATE TRIGGER IF NOT EXISTS ledger_stays BEFORE UPDATE ON ledger
    BEGIN SELECT RAISE(ABORT, 'the ledger is only added to'); END;
CREATE TRIGGER IF NOT EXISTS outcomes_stay BEFORE UPDATE ON ledger_outcomes
    BEGIN SELECT RAISE(ABORT, 'the ledger is only added to'); END;
"""


_SHM_SIZE = 4874  # SQLITE_IOERR_SHMSIZE: no room for the index of the write-ahead log


def remedy(error: sqlite3.Error | OSError) -> str:
    """What to do about a state folder that cannot be opened or written."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code in (sqlite3.SQLITE_FULL, _SHM_SIZE) or (isinstance(error, OSError) and error.errno in NO_ROOM):
        return "its disk is full: free some space there, or move the folder (state_dir) to another disk"
    match code & 0xFF:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return "state.db is damaged: move it away; identity and models are kept"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return "another process holds its lock: end it, or try again"
        case sqlite3.SQLITE_IOERR:
            return "its disk does not read or write: the kernel's log says more"
    return "see that this user may write to it, and that its disk is mounted writable"


class State:
    """An open state folder. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_private(folder)
        self.connection = sqlite3.connect(folder / "state.db", timeout=30, isolation_level=None)
        self.connection.row_factory = sqlite3.Row
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.executescript(_SCHEMA)

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """One transaction, durable at the end of the block, rolled back if the block raises."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def paused(self) -> bool:
        row = self.connection.execute("SELECT value FROM flags WHERE name = 'paused'").fetchone()
        return row is not None and row["value"] == "yes"

    def set_paused(self, paused: bool) -> None:
        with self.change() as write:
            write.execute("INSERT OR REPLACE INTO flags VALUES ('paused', ?)", ("yes" if paused else "no",))

    def opted_out(self) -> tuple[str, ...]:
        return tuple(row["run"] for row in self.connection.execute("SELECT run FROM opted_out ORDER BY run"))

    def set_opted_out(self, run: str, out: bool) -> None:
        with self.change() as write:
            if out:
                write.execute("INSERT OR IGNORE INTO opted_out VALUES (?)", (run,))
            else:
                write.execute("DELETE FROM opted_out WHERE run = ?", (run,))

    def task(self) -> TaskOffer | None:
        """The task in hand; also None if another version of the software stored it in another format."""
        row = self.connection.execute("SELECT offer FROM task").fetchone()
        try:
            return parse_message(TaskOffer, json.loads(row["offer"]), "task") if row is not None else None
        except InvalidDocument:
            return None

    def hold(self, offer: TaskOffer, now: float) -> None:
        """Stores a task as the one in hand, and its run as in use."""
        with self.change() as write:
            write.execute("INSERT OR REPLACE INTO task VALUES (1, ?)", (json.dumps(to_json(offer)),))
            write.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (offer.run, now))
            write.execute("DELETE FROM run_blobs WHERE run = ?", (offer.run,))
            write.executemany(
                "INSERT OR IGNORE INTO run_blobs VALUES (?, ?)",
                [(offer.run, ref.sha256) for ref in offer.blobs],
            )

    def release(self, write: sqlite3.Connection, task: str) -> None:
        """Within a `change`: deletes the task in hand, if it is this one."""
        write.execute("DELETE FROM task WHERE json_extract(offer, '$.task') = ?", (task,))

    def blobs_in_use(self) -> set[str]:
        used = {row["sha256"] for row in self.connection.execute("SELECT sha256 FROM run_blobs")}
        return used.union(*({ref.sha256 for ref in offer.blobs} for offer in self.own_models().values()))

    def keep_own_model(self, offer: TaskOffer) -> None:
        """Stores the task, whose files are here, as the last one of its run for the device's own model."""
        with self.change() as write:
            stored = json.dumps(to_json(offer))
            write.execute("INSERT OR REPLACE INTO own_models VALUES (?, ?)", (offer.run, stored))

    def own_models(self) -> dict[str, TaskOffer]:
        """Run id -> its last task, of runs that leave a model of the device's own here."""
        found = {}
        for row in self.connection.execute("SELECT run, offer FROM own_models"):
            with suppress(InvalidDocument):  # stored by another version of the software
                found[row["run"]] = parse_message(TaskOffer, json.loads(row["offer"]), "task")
        return found

    def runs(self) -> dict[str, float]:
        """Run id -> when it last gave this device a task."""
        return {row["run"]: row["used_at"] for row in self.connection.execute("SELECT * FROM runs")}

    def forget_blobs(self, run: str) -> None:
        with self.change() as write:
            write.execute("DELETE FROM run_blobs WHERE run = ?", (run,))

    def forget_run(self, run: str) -> None:
        with self.change() as write:
            write.execute("DELETE FROM run_blobs WHERE run = ?", (run,))
            write.execute("DELETE FROM runs WHERE run = ?", (run,))
            write.execute("DELETE FROM own_models WHERE run = ?", (run,))


def make_private(folder: Path) -> None:
    """Creates the state folder, accessible to this user only.

    Raises:
        UserError: it cannot be created or belongs to another user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UserError(
            f"the state folder {folder} cannot be used: {error.strerror}; give another with --state-dir, or run as "
            "the user it belongs to"
        ) from None


def lock(folder: Path) -> IO[str] | None:
    """Locks the state folder for this process; None if another process holds it. The lock ends with the process."""
    make_private(folder)
    file = (folder / "lock").open("a+", encoding="ascii")
    if not _try_lock(file):
        file.close()
        return None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _try_lock(file: IO[str]) -> bool:
    """Tries for a while: `daemon_pid` in another command holds the lock for a moment."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        else:
            return True


def daemon_pid(folder: Path) -> int | None:
    """The process that has locked the state folder, if any."""
    try:
        with (folder / "lock").open("r", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = (folder / "lock").read_text("ascii").strip()
        return int(text) if text.isdecimal() else None
