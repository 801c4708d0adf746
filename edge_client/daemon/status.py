"""The daemon's current activity, in a small file that `fedloop-edge status` reads.

Deliberately not durable: it is written often, and after a power cut there is no activity.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_client.ota import slots
from edge_client.state import State, daemon_pid
from edge_client.transport import identity
from edge_client.wire.device import TaskOffer
from edge_client.wire.strict import printable

_NOTES = 10
_WAITING = ("idle", "holding")
"""States between tasks."""


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
    """Writes the file, reports the status to the service manager, by `notify`, and logs what is new, by `log`."""

    def __init__(
        self,
        folder: Path,
        wall: Callable[[], float],
        notify: Callable[[str], None],
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._path = folder / "status.json"
        self._wall = wall
        self._notify = notify
        self._log = log
        self._logged = ""
        self._now = Status("starting", "", wall())
        self._reached_at = 0.0
        self._notes: deque[str] = deque(maxlen=_NOTES)

    def reached(self) -> None:
        """Records that the coordinator answered."""
        self._reached_at = self._wall()

    def note(self, *messages: str) -> None:
        """Keeps messages for people; a repeated one is kept once."""
        for text in map(printable, messages):
            if text not in self._notes:
                self._notes.append(text)
                self._log_line(text)

    def write(self, state: str, message: str, offer: TaskOffer | None = None) -> None:
        self._notify(f"STATUS={state}: {printable(message)}")
        self._log_status(state, printable(message))
        same = state == self._now.state
        self._now = Status(
            state=state,
            words=printable(message),
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
        except OSError:  # a full disk: the daemon goes on, and `read` reports the free space
            with suppress(OSError):
                temporary.unlink()

    def _log_status(self, state: str, message: str) -> None:
        """Logs a status that differs from the last one; check-ins while waiting do not."""
        line = f"{state}: {message}"
        status = "waiting" if state in _WAITING else line
        if status != self._logged:
            self._logged = status
            self._log_line(line)

    def _log_line(self, text: str) -> None:
        now = datetime.fromtimestamp(self._wall()).astimezone()
        self._log(f"{now.isoformat(sep=' ', timespec='seconds')} {text}")


def read(folder: Path) -> dict[str, Any]:
    """Everything known about the daemon in `folder`, whether it runs or not."""
    member = identity.load(folder)
    pid = daemon_pid(folder)
    with closing(State(folder)) as state:
        paused, opted_out = state.paused(), state.opted_out()
        waiting = state.connection.execute("SELECT count(*) FROM outbox").fetchone()[0]
    path = folder / "status.json"
    try:
        last = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # none yet, or truncated by a power cut
        last = {}
    return {
        "enrolled": member is not None,
        "device": member.device if member else None,
        "name": member.name if member else None,
        "coordinator": member.url if member else None,
        "certificate_not_after": member.not_after if member else None,
        "running": pid is not None,
        "pid": pid,
        "paused": paused,
        "results_waiting": waiting,
        "opted_out": list(opted_out),
        "models": _describe_models(folder),
        "disk_free_bytes": shutil.disk_usage(folder).free,
        **last,
    }


def _describe_models(state_dir: Path) -> list[dict[str, Any]]:
    described = []
    for model in slots.models(state_dir):
        pointer = slots.read(state_dir, model)
        held = {name: slot.version for name in ("a", "b") if (slot := pointer.slot(name)) is not None}
        last = pointer.last
        described.append(
            {
                "model": model,
                "active": pointer.active,
                "version": pointer.running.version if pointer.running is not None else None,
                "slots": held,
                "on_trial": pointer.trial_starts is not None,
                "golden_accuracy": pointer.running.golden_accuracy if pointer.running is not None else None,
                "failed": {str(each.version): each.code for each in pointer.failed},
                "last": last
                and {key: getattr(last, key) for key in ("version", "standing", "code", "words")},
            }
        )
    return described
