"""What the daemon is doing, in a small file that `fedloop-edge status` reads.

Not durable on purpose: it is written often, and after a power cut nobody is doing anything.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edge_client import identity
from edge_client.ota import releases
from edge_client.state import State, daemon_pid
from edge_client.wire.device import TaskOffer

_NOTES = 10


@dataclass(frozen=True)
class Status:
    """Times are seconds since 1970 by this machine's clock; 0: never."""

    state: str
    words: str
    since: float
    reached_at: float = 0.0
    run: str = ""
    run_name: str = ""
    round: int = 0
    notes: tuple[str, ...] = field(default=())


class Writer:
    """Keeps the file up to date; writes when something changed."""

    def __init__(self, folder: Path, wall: Callable[[], float]) -> None:
        self._path = folder / "status.json"
        self._wall = wall
        self._now = Status("starting", "", wall())
        self._reached_at = 0.0
        self._notes: deque[str] = deque(maxlen=_NOTES)

    def reached(self) -> None:
        """The coordinator answered."""
        self._reached_at = self._wall()

    def note(self, words: str) -> None:
        """Something worth knowing later; the same again is not repeated."""
        if words not in self._notes:
            self._notes.append(words)

    def write(self, state: str, words: str, offer: TaskOffer | None = None) -> None:
        same = state == self._now.state
        self._now = Status(
            state=state,
            words=words,
            since=self._now.since if same else self._wall(),
            reached_at=self._reached_at,
            run=offer.run if offer is not None else "",
            run_name=offer.run_name if offer is not None else "",
            round=offer.round if offer is not None else 0,
            notes=tuple(self._notes),
        )
        temporary = self._path.with_name(f".status.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(asdict(self._now)), "utf-8")
            temporary.replace(self._path)
        except OSError:  # a full disk: the daemon goes on, and `read` says what is the matter
            with suppress(OSError):
                temporary.unlink()


def read(folder: Path) -> dict[str, Any]:
    """All that can be said about the daemon in `folder`, whether it runs or not."""
    who = identity.load(folder)
    pid = daemon_pid(folder)
    state = State(folder)
    try:
        paused, waiting = (
            state.paused(),
            state.connection.execute("SELECT count(*) FROM outbox").fetchone()[0],
        )
        opted_out = state.opted_out()
    finally:
        state.close()
    path = folder / "status.json"
    try:
        last = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # none yet, or half of one from before a power cut
        last = {}
    return {
        "enrolled": who is not None,
        "device": who.device if who else None,
        "name": who.name if who else None,
        "coordinator": who.url if who else None,
        "certificate_not_after": who.not_after if who else None,
        "running": pid is not None,
        "pid": pid,
        "paused": paused,
        "results_waiting": waiting,
        "opted_out": list(opted_out),
        "models": releases.shown(folder),
        "disk_free_bytes": shutil.disk_usage(folder).free,
        **last,
    }
