"""The ledger: everything that ever left this device, written before the first byte leaves.

Entries are only added to, here and by the database itself; what became of one is a row of its own. Payloads
are kept for viewing as long as they fit `PAYLOAD_BYTES` together; entries stay when theirs has gone.
`explained_by` says what else the coordinator learns: the keys of a check-in.
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
from edge_client.outbox import Waiting, inflated
from edge_client.state import State
from edge_client.wire.device import CheckIn, EnrolRequest

PAYLOAD_BYTES = 256 * 1024 * 1024
MOST_PAYLOADS = 4096

_NOTHING_DONE = "nothing clipped, nothing noised"


@dataclass(frozen=True)
class Entry:
    """One thing that left, or was about to. `outcome`: delivered, why it was dropped, or empty: not known yet."""

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
    """One tensor of a payload, without showing all of it."""

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

    def leaving(self, waiting: Waiting, payload: Path, now: float) -> None:
        """Writes that these bytes are about to leave. Again for a further attempt: it is one entry.

        Other bytes for the same task, which a coordinator may ask for, are another.
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

    def outcome(self, waiting: Waiting, outcome: str, now: float) -> None:
        """Adds what became of a result that was sent, once."""
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
        """Raises UserMistake where there is none."""
        for each in self.entries():
            if each.id == number:
                return each
        raise UserMistake(f"the ledger has no entry {number}; `fedloop-edge ledger` lists them")

    def payload(self, entry: Entry) -> bytes:
        """The result as it was before encoding.

        Raises:
            UserMistake: it is no longer kept.
        """
        if not entry.payload_kept:
            raise UserMistake(
                f"the payload of entry {entry.id} is not kept any more: the newest {self._payload_bytes} bytes are"
            )
        return inflated(self._path(entry.sha256), entry.encoding)

    def wipe(self) -> None:
        """Forgets all entries and payloads. Only a person asks for this."""
        with self._state.change() as write:
            write.execute("DELETE FROM ledger_outcomes")
            write.execute("DELETE FROM ledger")
        for path in self._folder.iterdir():
            path.unlink()

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256

    def _keep(self, waiting: Waiting, payload: Path) -> None:
        """A second name for the same bytes where the file system has such, and room made for it.

        Without room for a copy the entry stands alone: the result was made to be delivered.
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
        """By the files themselves, not by the entries, of which there are ever more."""
        kept = sorted(self._folder.iterdir(), key=lambda path: (path != newest, -path.stat().st_mtime_ns))
        size = 0
        for number, path in enumerate(kept):
            size += path.stat().st_size
            if size > self._payload_bytes or number >= MOST_PAYLOADS:
                path.unlink()


def viewed(payload: bytes) -> list[TensorView]:
    """The tensors of an update: shapes, norms and extremes."""
    import numpy as np  # only a person who looks needs it

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


def explained_by(example: CheckIn) -> dict[str, Any]:
    """What the coordinator learns besides the entries: the messages, key by key, with this device's own values."""
    return {
        "check-in": {each.name: getattr(example, each.name) for each in fields(CheckIn)},
        "enrolment": [each.name for each in fields(EnrolRequest)],
        "decline": ["code", "words"],
        "network": ["address", "times of requests"],
    }
