"""Ends a sleep early: from a signal handler or from another thread."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class ShutdownRequested(BaseException):
    """Raised by a signal handler at any point of the daemon's work: it is safe to end anywhere."""


class WakeupPipe:
    """Wakes a sleeper from a signal handler or another thread; a wakeup before the sleep counts."""

    def __init__(self) -> None:
        # A pipe, not an Event: a signal handler that runs while its own thread holds the Event's lock waits forever.
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self) -> None:
        with suppress(BlockingIOError):  # so full of wakeups that one more does not matter
            os.write(self._write, b".")

    def wait(self, seconds: float) -> bool:
        """True if it was woken, False when the time is up."""
        if not select.select([self._read], [], [], max(0.0, seconds))[0]:
            return False
        os.read(self._read, 4096)
        return True
