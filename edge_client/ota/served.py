"""A model that ends whoever predicts with it, again and again, is found out too: services note their starts, the daemon reads them.

    releases/<model>/served-<digest of the socket's path>.json    {"version": 4, "starts": 2}

A service counts before it opens a version, and forgets the count when it lasted or ended in order: what is left is the
number of starts that did neither. The daemon alone turns back to the other slot (`edge_client.ota.releases`), as after a
crash loop of its own, on trial or not. Nothing here keeps a service from its work: what cannot be written is not counted.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_client.files import write_durably
from edge_client.ota import slots
from edge_client.ota.slots import Pointer
from edge_client.wire.strict import Unfit, loads, parse

MOST_STARTS = 3
"""Of one service with one version without lasting; one more is a crash loop."""

LASTING_SECONDS = 60.0
_PATTERN = "served-*.json"


@dataclass(frozen=True)
class _Count:
    version: int
    starts: int


class Starts:
    """Of one service, known by its socket. `now`: seconds, never jumps."""

    def __init__(self, state_dir: Path, socket: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._state_dir = state_dir
        self._name = f"served-{hashlib.sha256(str(socket.absolute()).encode()).hexdigest()[:16]}.json"
        self._now = now
        self._path: Path | None = None
        self.lasts_at = float("inf")

    def opening(self, folder: Path) -> None:
        """The version in this slot is about to be opened."""
        self.settled()
        model = folder.parent.name
        running = slots.read(self._state_dir, model).running
        if running is None:
            return
        path = folder.with_name(self._name)
        before = _read(path)
        again = before is not None and before.version == running.version
        count = _Count(running.version, before.starts + 1 if before is not None and again else 1)
        with suppress(OSError):
            write_durably(path, json.dumps(asdict(count)).encode(), mode=0o600)
            self._path, self.lasts_at = path, self._now() + LASTING_SECONDS

    def settled(self) -> None:
        """What is open has lasted, or is closed in order."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._path, self.lasts_at = None, float("inf")


def models(state_dir: Path) -> list[str]:
    """Models of which something is counted."""
    return sorted({path.parent.name for path in (state_dir / "releases").glob(f"*/{_PATTERN}")})


def crash_loop(state_dir: Path, pointer: Pointer) -> int | None:
    """How often a service was started with the active version without lasting, where that is more than it may be."""
    running = pointer.running
    if running is None:
        return None
    counts = map(_read, slots.folder_of(state_dir, pointer.model).glob(_PATTERN))
    most = max((each.starts for each in counts if each and each.version == running.version), default=0)
    return most if most > MOST_STARTS else None


def forget(state_dir: Path, pointer: Pointer) -> None:
    """Removes what was counted of versions that do not run any more, by services that are gone."""
    version = pointer.running.version if pointer.running is not None else None
    for path in slots.folder_of(state_dir, pointer.model).glob(_PATTERN):
        count = _read(path)
        if count is None or count.version != version:
            path.unlink(missing_ok=True)


def _read(path: Path) -> _Count | None:
    try:
        return parse(_Count, loads(path.read_bytes(), str(path)), str(path))
    except (OSError, Unfit):
        return None
