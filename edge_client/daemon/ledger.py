"""The ledger: everything that ever left this device, recorded before the first byte leaves.

It is append-only, enforced by the database; an outcome is a separate row. Payloads are kept for viewing as long as
they fit `PAYLOAD_BYTES` together; entries stay when their payload is deleted. `explain` lists what else the
coordinator learns: the keys of a check-in.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from edge_client.errors import UserMistake
from edge_client.files import make_durably
from edge_client.outbox import PendingResult, inflate
from edge_client.state import State
from edge_client.wire.device import CheckIn, EnrolRequest

PAYLOAD_BYTES = 256 * 1024 * 1024
MOST_PAYLOADS = 4096

_NOTHING_DONE = "nothing clipped, nothing noised"


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


@dataclass(frozen=True)
class TensorView:
    """Summary of one tensor of a payload."""

    name: str
    shape: tuple[int, ...]
    norm: float
    smallest: float
    largest: float


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
        values = (
            now,
            waiting.task,
            waiting.run,
            waiting.run_name,
            waiting.round,
            "update" if waiting.kind == "train" else "evaluation",
            waiting.size_bytes,
            waiting.sha256,
            waiting.encoding,
            waiting.treated or _NOTHING_DONE,
        )
        columns = "at, task, run, run_name, round, kind, size_bytes, sha256, encoding, treated"
        with self._state.change() as write:
            write.execute(
                f"INSERT OR IGNORE INTO ledger ({columns}) VALUES ({', '.join('?' * len(values))})", values
            )
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
        """Raises UserMistake if there is no such entry."""
        for each in self.entries():
            if each.id == number:
                return each
        raise UserMistake(f"the ledger has no entry {number}; `fedloop-edge ledger` lists them")

    def payload(self, entry: Entry) -> bytes:
        """The result as it was before encoding.

        Raises:
            UserMistake: the payload is no longer kept.
        """
        if not entry.payload_kept:
            raise UserMistake(
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
            if size > self._payload_bytes or number >= MOST_PAYLOADS:
                path.unlink()


def summarize_tensors(payload: bytes) -> list[TensorView]:
    """Shapes, norms and extremes of an update's tensors."""
    import numpy as np  # only needed for viewing

    from edge_client.wire import arrays

    views = []
    for name, values in sorted(arrays.decode(payload).items()):
        exact = np.asarray(values, np.float64)
        views.append(
            TensorView(
                name,
                tuple(int(extent) for extent in exact.shape),
                float(np.linalg.norm(exact)),
                float(exact.min()) if exact.size else 0.0,
                float(exact.max()) if exact.size else 0.0,
            )
        )
    return views


def explain(example: CheckIn) -> dict[str, Any]:
    """What the coordinator learns besides the entries: the keys of each message, with this device's own values."""
    return {
        "check-in": {each.name: getattr(example, each.name) for each in fields(CheckIn)},
        "enrolment": [each.name for each in fields(EnrolRequest)],
        "decline": ["code", "words"],
        "network": ["address", "times of requests"],
    }
