"""The outbox: finished results to deliver, durable over restarts and power cuts.

A result is a file and a row, both durable before it is sent. It leaves the outbox when the coordinator accepts it or
refuses it for good. Its disk space is bounded: when the outbox is full, results whose round is over are dropped first,
the oldest before others, then the oldest of the rest.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.files import sync_folder
from edge_client.state import State
from edge_client.wire.device import Encoding, TaskKind, TaskOffer

MOST_RESULTS = 64
_CHUNK_BYTES = 1024 * 1024


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
    """The results in a state folder, at most `most_bytes` on disk."""

    def __init__(self, state: State, most_bytes: int) -> None:
        self._state = state
        self._most_bytes = most_bytes
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
        if decoded > self._most_bytes:
            raise OutboxFull(f"a result of {decoded} bytes does not fit the outbox of {self._most_bytes}")
        if deflate:
            try:
                _deflate(result, path)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            result.unlink()
        else:
            _sync(result)
            result.replace(path)
        if state_out is not None and state_out.exists():
            _sync(state_out)
            state_out.replace(kept)
        sync_folder(self.folder)
        waiting = PendingResult(
            task=offer.task,
            run=offer.run,
            run_name=offer.run_name,
            round=offer.round,
            kind=offer.kind,
            size_bytes=path.stat().st_size,
            sha256=_sha256(path),
            decoded_bytes=decoded,
            encoding="deflate" if deflate else "identity",
            stored_at=now,
            closes_at=now + offer.deadline_seconds,
            treated=", ".join(treated),
        )
        with self._state.change() as write:
            names = ", ".join(f":{name}" for name in vars(waiting))
            write.execute(
                f"INSERT OR REPLACE INTO outbox ({', '.join(vars(waiting))}) VALUES ({names})", vars(waiting)
            )
            self._state.release(write, offer.task)
        return waiting, self._make_room(waiting, now)

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

    def _make_room(self, newest: PendingResult, now: float) -> list[PendingResult]:
        rows = self.pending()
        dropped = to_drop(rows, newest, most_bytes=self._most_bytes, now=now)
        for row in dropped:
            self.drop(row)
        return dropped


def to_drop(
    rows: list[PendingResult], newest: PendingResult, *, most_bytes: int, now: float
) -> list[PendingResult]:
    """The rows to drop so that the rest fits: rows of closed rounds first, then the oldest; never `newest`."""
    order = sorted(rows, key=lambda row: (row.closes_at > now, row.stored_at, row.task))
    dropped: list[PendingResult] = []
    count, size = len(rows), sum(row.size_bytes for row in rows)
    for row in order:
        if count <= MOST_RESULTS and size <= most_bytes:
            break
        if row.task != newest.task:
            dropped.append(row)
            count, size = count - 1, size - row.size_bytes
    return dropped


def inflate(path: Path, encoding: str) -> bytes:
    """The result as it was before encoding."""
    content = path.read_bytes()
    return zlib.decompress(content) if encoding == "deflate" else content


def _deflate(source: Path, target: Path) -> None:
    packer = zlib.compressobj(6)
    with source.open("rb") as plain, target.open("wb") as packed:
        _each_chunk(plain.read, lambda chunk: packed.write(packer.compress(chunk)))
        packed.write(packer.flush())
        packed.flush()
        os.fsync(packed.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        _each_chunk(file.read, digest.update)
    return digest.hexdigest()


def _each_chunk(read: Callable[[int], bytes], use: Callable[[bytes], object]) -> None:
    while chunk := read(_CHUNK_BYTES):
        use(chunk)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _is_complete(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size
