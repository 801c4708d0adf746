"""Results on their way out: the outbox, which keeps them until they are delivered, and the ledger of what left.

The outbox is durable over restarts and power cuts: a result is a file and a row, both durable before it is sent. It
leaves the outbox when the coordinator accepts it or refuses it for good. Its disk space is bounded: when the outbox is
full, results whose round is over are dropped first, the oldest before others, then the oldest of the rest.

The ledger records everything that ever left this device, before the first byte leaves. It is append-only, enforced by the
database; an outcome is a separate row. Payloads are kept for viewing as long as they fit `PAYLOAD_BYTES` together;
entries stay when their payload is deleted. `explain` lists what else the coordinator learns: the keys of a check-in.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from edge_client.errors import UserError
from edge_client.files import file_sha256, make_durably, sync_file, sync_folder
from edge_client.state import State
from edge_client.wire.device import CheckIn, Encoding, EnrolRequest, TaskKind, TaskOffer

MAX_RESULTS = 64
_CHUNK_BYTES = 1024 * 1024

PAYLOAD_BYTES = 256 * 1024 * 1024
MAX_PAYLOADS = 4096
_ENTRY_KINDS: Mapping[TaskKind, str] = {
    "train": "update",
    "evaluate": "evaluation",
    "statistics": "statistics",
}
_NOTHING_DONE = "nothing clipped, nothing noised"


class OutboxFull(ValueError):
    """The result alone exceeds the size limit of the outbox."""


@dataclass(frozen=True)
class PendingResult:
    """A result in the outbox. Sizes in bytes, times in seconds since 1970; `sha256` of the encoded bytes.

    `treated`: description of the protection applied to the data, such as clipping or noise; empty: none.
    """

    task: str
    run: str
    run_name: str
    round: int
    kind: TaskKind
    size_bytes: int
    sha256: str
    decoded_bytes: int
    encoding: Encoding
    stored_at: float
    closes_at: float
    treated: str = ""


class Outbox:
    """The results in a state folder, at most `max_bytes` on disk."""

    def __init__(self, state: State, max_bytes: int) -> None:
        self._state = state
        self._max_bytes = max_bytes
        self.folder = state.folder / "outbox"
        self.folder.mkdir(exist_ok=True, mode=0o700)

    def store(
        self,
        offer: TaskOffer,
        result: Path,
        state_out: Path | None,
        *,
        treated: Sequence[str] = (),
        deflate: bool,
        now: float,
    ) -> tuple[PendingResult, list[PendingResult]]:
        """Stores the result durably. Returns it, and the results dropped to make room.

        `state_out`: the client rule's next state, kept with the result until the coordinator accepts it.

        Raises:
            OutboxFull: the result can never fit.
            OSError: the disk is full.
        """
        path, kept = self.path(offer.task), self.state_path(offer.task)
        decoded = result.stat().st_size
        if decoded > self._max_bytes:
            raise OutboxFull(f"a result of {decoded} bytes does not fit the outbox of {self._max_bytes}")
        if deflate:
            try:
                _deflate(result, path)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            result.unlink()
        else:
            sync_file(result)
            result.replace(path)
        if state_out is not None and state_out.exists():
            sync_file(state_out)
            state_out.replace(kept)
        sync_folder(self.folder)
        waiting = PendingResult(
            task=offer.task,
            run=offer.run,
            run_name=offer.run_name,
            round=offer.round,
            kind=offer.kind,
            size_bytes=path.stat().st_size,
            sha256=file_sha256(path),
            decoded_bytes=decoded,
            encoding="deflate" if deflate else "identity",
            stored_at=now,
            closes_at=now + offer.deadline_seconds,
            treated=", ".join(treated),
        )
        with self._state.change() as write:
            _insert(write, "REPLACE INTO outbox", vars(waiting))
            self._state.release(write, offer.task)
        dropped = to_drop(self.pending(), waiting, max_bytes=self._max_bytes, now=now)
        for row in dropped:
            self.drop(row)
        return waiting, dropped

    def pending(self) -> list[PendingResult]:
        """Oldest first."""
        rows = self._state.connection.execute("SELECT * FROM outbox ORDER BY stored_at, task")
        return [PendingResult(**dict(row)) for row in rows]

    def accept(self, waiting: PendingResult, rule_state: Path) -> None:
        """After acceptance: moves the client rule's next state to `rule_state` and deletes the result."""
        kept = self.state_path(waiting.task)
        if kept.exists():
            rule_state.parent.mkdir(exist_ok=True, mode=0o700)
            kept.replace(rule_state)
            sync_folder(rule_state.parent)
        self.drop(waiting)

    def drop(self, waiting: PendingResult) -> None:
        """Deletes a result, delivered or not."""
        with self._state.change() as write:
            write.execute("DELETE FROM outbox WHERE task = ?", (waiting.task,))
        self.path(waiting.task).unlink(missing_ok=True)
        self.state_path(waiting.task).unlink(missing_ok=True)

    def sweep(self) -> list[PendingResult]:
        """Removes files without a row, left by a crash, and rows without a complete file; returns those rows."""
        rows = self.pending()
        known = {path.name for row in rows for path in (self.path(row.task), self.state_path(row.task))}
        for path in self.folder.iterdir():
            if path.name not in known:
                path.unlink()
        lost = [row for row in rows if not _is_complete(self.path(row.task), row.size_bytes)]
        for row in lost:
            self.drop(row)
        return lost

    def path(self, task: str) -> Path:
        return self.folder / f"{task}.result"

    def state_path(self, task: str) -> Path:
        return self.folder / f"{task}.state"


def to_drop(
    rows: list[PendingResult], newest: PendingResult, *, max_bytes: int, now: float
) -> list[PendingResult]:
    """The rows to drop so that the rest fits: rows of closed rounds first, then the oldest; never `newest`."""
    order = sorted(rows, key=lambda row: (row.closes_at > now, row.stored_at, row.task))
    dropped: list[PendingResult] = []
    count, size = len(rows), sum(row.size_bytes for row in rows)
    for row in order:
        if count <= MAX_RESULTS and size <= max_bytes:
            break
        if row.task != newest.task:
            dropped.append(row)
            count, size = count - 1, size - row.size_bytes
    return dropped


def _insert(write: sqlite3.Connection, into: str, row: Mapping[str, Any]) -> None:
    columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    write.execute(f"INSERT OR {into} ({columns}) VALUES ({values})", row)


def inflate(path: Path, encoding: str) -> bytes:
    """The result as it was before encoding."""
    content = path.read_bytes()
    return zlib.decompress(content) if encoding == "deflate" else content


def _deflate(source: Path, target: Path) -> None:
    packer = zlib.compressobj(6)
    with source.open("rb") as plain, target.open("wb") as packed:
        while chunk := plain.read(_CHUNK_BYTES):
            packed.write(packer.compress(chunk))
        packed.write(packer.flush())
        packed.flush()
        os.fsync(packed.fileno())


def _is_complete(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


@dataclass(frozen=True)
class Entry:
    """One result that left, or was about to. `outcome`: delivered, why it was dropped, or empty: not yet known."""

    id: int
    at: float
    task: str
    run: str
    run_name: str
    round: int
    kind: str
    size_bytes: int
    sha256: str
    encoding: str
    treated: str
    outcome: str
    payload_kept: bool


class Ledger:
    """The ledger of a state folder."""

    def __init__(self, state: State, *, payload_bytes: int = PAYLOAD_BYTES) -> None:
        self._state = state
        self._payload_bytes = payload_bytes
        self._folder = state.folder / "ledger"
        self._folder.mkdir(exist_ok=True, mode=0o700)

    def record(self, waiting: PendingResult, payload: Path, now: float) -> None:
        """Records that these bytes are about to leave. Further attempts share the entry.

        Other bytes for the same task, which a coordinator may request, get another entry.
        """
        names = ("task", "run", "run_name", "round", "size_bytes", "sha256", "encoding")
        entry: dict[str, Any] = {name: getattr(waiting, name) for name in names}
        entry["at"] = now
        entry["kind"] = _ENTRY_KINDS[waiting.kind]
        entry["treated"] = waiting.treated or _NOTHING_DONE
        with self._state.change() as write:
            _insert(write, "IGNORE INTO ledger", entry)
        self._keep(waiting, payload)

    def record_outcome(self, waiting: PendingResult, outcome: str, now: float) -> None:
        """Adds the outcome of a sent result, once."""
        with self._state.change() as write:
            write.execute(
                "INSERT INTO ledger_outcomes SELECT id, ?, ? FROM ledger WHERE task = ? AND sha256 = ? AND NOT EXISTS "
                "(SELECT 1 FROM ledger_outcomes WHERE entry = ledger.id AND outcome = ?)",
                (now, outcome, waiting.task, waiting.sha256, outcome),
            )

    def entries(self) -> list[Entry]:
        """Oldest first."""
        rows = self._state.connection.execute(
            "SELECT ledger.*, coalesce((SELECT outcome FROM ledger_outcomes WHERE entry = ledger.id "
            "ORDER BY rowid DESC LIMIT 1), '') AS outcome FROM ledger ORDER BY id"
        )
        return [Entry(**dict(row), payload_kept=self._path(row["sha256"]).exists()) for row in rows]

    def entry(self, number: int) -> Entry:
        """Raises UserError if there is no such entry."""
        for each in self.entries():
            if each.id == number:
                return each
        raise UserError(f"the ledger has no entry {number}; `fedloop-edge ledger` lists them")

    def payload(self, entry: Entry) -> bytes:
        """The result as it was before encoding.

        Raises:
            UserError: the payload is no longer kept.
        """
        if not entry.payload_kept:
            raise UserError(
                f"the payload of entry {entry.id} is no longer kept; only the newest {self._payload_bytes} bytes are"
            )
        return inflate(self._path(entry.sha256), entry.encoding)

    def wipe(self) -> None:
        """Deletes all entries and payloads, only at a person's request."""
        with self._state.change() as write:
            write.execute("DELETE FROM ledger_outcomes")
            write.execute("DELETE FROM ledger")
        for path in self._folder.iterdir():
            path.unlink()

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256

    def _keep(self, waiting: PendingResult, payload: Path) -> None:
        """Hard-links the payload, or copies it on file systems without links, and makes room.

        Without room for a copy there is an entry without a payload: delivering the result matters more.
        """
        path = self._path(waiting.sha256)
        if waiting.size_bytes > self._payload_bytes or path.exists():
            return
        try:
            os.link(payload, path)
        except OSError:
            with suppress(OSError):
                make_durably(path, lambda temporary: shutil.copyfile(payload, temporary), mode=0o600)
        self._make_room(path)

    def _make_room(self, newest: Path) -> None:
        """Counts the files, not the ever-growing entries."""
        kept = sorted(self._folder.iterdir(), key=lambda path: (path != newest, -path.stat().st_mtime_ns))
        size = 0
        for number, path in enumerate(kept):
            size += path.stat().st_size
            if size > self._payload_bytes or number >= MAX_PAYLOADS:
                path.unlink()


def summarize_tensors(payload: bytes) -> list[dict[str, Any]]:
    """Name, shape, norm and extremes of each tensor of an update."""
    import numpy as np  # only needed for viewing

    from edge_client.wire import arrays

    decoded = sorted(arrays.decode(payload).items())
    exact = {name: np.asarray(values, np.float64) for name, values in decoded}
    return [
        {
            "name": name,
            "shape": values.shape,
            "norm": float(np.linalg.norm(values)),
            "smallest": float(values.min()) if values.size else 0.0,
            "largest": float(values.max()) if values.size else 0.0,
        }
        for name, values in exact.items()
    ]


def masked_bytes(payload: bytes) -> int | None:
    """Bytes of a masked update; None of a result in the open."""
    from strategies.secagg.messages import (  # only needed for viewing
        HEADER_BYTES,
        SESSION_BYTES,
        Kind,
        header,
    )

    is_masked = payload[: HEADER_BYTES - SESSION_BYTES] == header(Kind.MASKED_INPUT, b"")
    return len(payload) - HEADER_BYTES if is_masked else None


def explain(example: CheckIn) -> dict[str, Any]:
    """What the coordinator learns besides the entries: the keys of each message, with this device's own values."""
    return {
        "check-in": {each.name: getattr(example, each.name) for each in fields(CheckIn)},
        "enrolment": [each.name for each in fields(EnrolRequest)],
        "decline": ["code", "words"],
        "secure aggregation": ["public keys", "encrypted shares", "masked update", "signatures", "shares"],
        "network": ["address", "times of requests"],
    }
