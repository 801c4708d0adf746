"""Counts a service's starts with a version, so that the daemon notices a model that crashes the service again and again.

    releases/<model>/served-<digest of the socket's path>.json    {"version": 4, "starts": 2}

A service counts before it opens a version, and clears the count once it has run long enough or stopped in order: the
count is the number of starts that did neither. Only the daemon switches to the other slot (`edge_client.ota.releases`), as
after a crash loop of its own, on trial or not. A count that cannot be written never keeps a service from its work.
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
from edge_client.ota.transitions import Pointer
from edge_client.wire.strict import InvalidDocument, loads, parse

MAX_STARTS = 3
"""Starts of one service with one version that may end early; one more is a crash loop."""

LASTING_SECONDS = 60.0
_PATTERN = "served-*.json"


@dataclass(frozen=True)
class _Count:
    version: int
    starts: int


class StartCounter:
    """The starts of one service, identified by its socket. `now`: monotonic seconds."""

    def __init__(self, state_dir: Path, socket: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._state_dir = state_dir
        self._name = f"served-{hashlib.sha256(str(socket.absolute()).encode()).hexdigest()[:16]}.json"
        self._now = now
        self._path: Path | None = None
        self.lasts_at = float("inf")

    def count(self, folder: Path) -> None:
        """Counts a start with the version in this slot, before it is opened."""
        self.clear()
        model = folder.parent.name
        running = slots.read(self._state_dir, model).running
        if running is None:
            return
        path = folder.with_name(self._name)
        previous = _read(path)
        same = previous is not None and previous.version == running.version
        count = _Count(running.version, previous.starts + 1 if previous is not None and same else 1)
        with suppress(OSError):
            write_durably(path, json.dumps(asdict(count)).encode(), mode=0o600)
            self._path, self.lasts_at = path, self._now() + LASTING_SECONDS

    def clear(self) -> None:
        """Clears the count: the open version has lasted, or is closed in order."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._path, self.lasts_at = None, float("inf")


def models(state_dir: Path) -> list[str]:
    """Models with a count."""
    return sorted({path.parent.name for path in (state_dir / "releases").glob(f"*/{_PATTERN}")})


def crash_loop(state_dir: Path, pointer: Pointer) -> int | None:
    """How often a service that uses the active version started without lasting, if more often than allowed."""
    running = pointer.running
    if running is None:
        return None
    counts = map(_read, slots.folder_of(state_dir, pointer.model).glob(_PATTERN))
    most = max((each.starts for each in counts if each and each.version == running.version), default=0)
    return most if most > MAX_STARTS else None


def forget(state_dir: Path, pointer: Pointer) -> None:
    """Removes the counts of versions that no longer run."""
    version = pointer.running.version if pointer.running is not None else None
    for path in slots.folder_of(state_dir, pointer.model).glob(_PATTERN):
        count = _read(path)
        if count is None or count.version != version:
            path.unlink(missing_ok=True)


def _read(path: Path) -> _Count | None:
    try:
        return parse(_Count, loads(path.read_bytes(), str(path)), str(path))
    except (OSError, InvalidDocument):
        return None
