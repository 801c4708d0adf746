"""A thread that hears what a fleet has to tell, as the thread of a run does."""

from __future__ import annotations

import threading
from contextlib import suppress

from coordinator.rounds.fleet import (
    Answer,
    Fleet,
    Silence,
    Stopped,
)

HANGS_SECONDS = 60.0


class Listening:
    """All that a fleet tells, heard in a thread."""

    def __init__(self, fleet: Fleet) -> None:
        self.reported: list[Answer | Silence] = []
        self._thread = threading.Thread(target=self._listen, args=(fleet,), daemon=True)
        self._thread.start()

    def _listen(self, fleet: Fleet) -> None:
        with suppress(Stopped):  # the world ended
            self.reported += fleet.results()

    def until_reported(self) -> list[Answer | Silence]:
        self._thread.join(HANGS_SECONDS)
        assert not self._thread.is_alive()
        return self.reported
