"""Waits for a condition, however long it takes: pytest's timeout ends what never comes."""

from __future__ import annotations

import threading
from collections.abc import Callable


def wait_until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not holds():
        pause.wait(0.01)
