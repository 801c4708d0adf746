"""Signals that ask a pretraining to save its work and stop, as cluster managers send them before they take a machine away."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` when one of `STOP_SIGNALS` arrives in the body. A `Supervisor`; in the main thread only."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
