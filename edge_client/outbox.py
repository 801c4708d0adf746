"""The outbox: finished results that wait to be delivered, over restarts and power cuts.

A result is a file and a row, both durable, before anybody tries to send it. It leaves the outbox when the
coordinator says that it counts, or that it never will. Disk is bounded: when it is full, results go whose
round is over, the oldest first, then the oldest of all.
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
    """The result alone is larger than the outbox may be."""


@dataclass(frozen=True)
class Waiting:
    """A result in the outbox. Sizes in bytes, times in seconds since 1970; `sha256` of the encoded bytes.

    `treated`: what was done to it to protect the data, such as clipping or noise, in words; empty: nothing.
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
    """The results in a state folder, which hold at most `most_bytes` on disk."""

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
    ) -> tuple[Waiting, list[Waiting]]:
        """Takes the result over; once this returns it survives. Also what had to go to make room for it.

        `state_out`: the client rule's next state, kept beside the result until the coordinator accepts it.

        Raises:
            OutboxFull: it can never fit.
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
        waiting = Waiting(
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
            self._state.let_go(write, offer.task)
        return waiting, self._make_room(waiting, now)

    def waiting(self) -> list[Waiting]:
        """Oldest first."""
        rows = self._state.connection.execute("SELECT * FROM outbox ORDER BY stored_at, task")
        return [Waiting(**dict(row)) for row in rows]

    def accepted(self, waiting: Waiting, rule_state: Path) -> None:
        """The coordinator counts it: the client rule's next state becomes `rule_state`, and the result goes."""
        kept = self.state_path(waiting.task)
        if kept.exists():
            rule_state.parent.mkdir(exist_ok=True, mode=0o700)
            kept.replace(rule_state)
            sync_folder(rule_state.parent)
        self.drop(waiting)

    def drop(self, waiting: Waiting) -> None:
        """It goes, delivered or never to be."""
        with self._state.change() as write:
            write.execute("DELETE FROM outbox WHERE task = ?", (waiting.task,))
        self.path(waiting.task).unlink(missing_ok=True)
        self.state_path(waiting.task).unlink(missing_ok=True)

    def sweep(self) -> list[Waiting]:
        """Removes files without a row, left by a crash, and rows without a whole file, which are returned."""
        rows = self.waiting()
        known = {path.name for row in rows for path in (self.path(row.task), self.state_path(row.task))}
        for path in self.folder.iterdir():
            if path.name not in known:
                path.unlink()
        lost = [row for row in rows if not _is_whole(self.path(row.task), row.size_bytes)]
        for row in lost:
            self.drop(row)
        return lost

    def path(self, task: str) -> Path:
        return self.folder / f"{task}.result"

    def state_path(self, task: str) -> Path:
        return self.folder / f"{task}.state"

    def _make_room(self, newest: Waiting, now: float) -> list[Waiting]:
        rows = self.waiting()
        gone = too_many(rows, newest, most_bytes=self._most_bytes, now=now)
        for row in gone:
            self.drop(row)
        return gone


def too_many(rows: list[Waiting], newest: Waiting, *, most_bytes: int, now: float) -> list[Waiting]:
    """Which rows must go so that the rest fits: those whose round is over first, then the oldest; never `newest`."""
    order = sorted(rows, key=lambda row: (row.closes_at > now, row.stored_at, row.task))
    gone: list[Waiting] = []
    count, size = len(rows), sum(row.size_bytes for row in rows)
    for row in order:
        if count <= MOST_RESULTS and size <= most_bytes:
            break
        if row.task != newest.task:
            gone.append(row)
            count, size = count - 1, size - row.size_bytes
    return gone


def inflated(path: Path, encoding: str) -> bytes:
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


def _is_whole(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size
