"""Keeps the lease of a task while the daemon works on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from edge_client.transport.failures import ServerRefused, Unreachable
from edge_client.transport.link import Link, parse_answer
from edge_client.wire.device import CheckIn, CheckInAnswer

_LONGEST_BEAT_SECONDS = 600.0


class Heartbeat:
    """Checks in for the task in hand every third of its lease, in its own thread, until closed."""

    def __init__(self, link: Link, message: CheckIn, seconds: float) -> None:
        self._link = link
        self._message = replace(message, wait_seconds=0.0)
        self._seconds = seconds
        self._closed = threading.Event()
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def unwanted(self) -> bool:
        """Whether the coordinator no longer wants the result."""
        return self._unwanted.is_set()

    def close(self) -> None:
        # Not joined: a beat may wait for a dead connection for a minute, and its answer no longer matters.
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                answer = parse_answer(CheckInAnswer, self._link.post("/checkin", self._message))
            except (Unreachable, ServerRefused):
                continue  # the work may still be wanted; the next beat or the delivery will tell
            except Exception:
                return  # the link was closed meanwhile
            if answer.stop:
                self._unwanted.set()
                return


@contextmanager
def heartbeat(link: Link, message: CheckIn, lease_seconds: float) -> Iterator[Heartbeat]:
    """Keeps the lease for the time of the block."""
    beats = Heartbeat(link, message, min(max(0.05, lease_seconds / 3), _LONGEST_BEAT_SECONDS))
    try:
        yield beats
    finally:
        beats.close()
