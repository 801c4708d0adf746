"""Waits for a condition."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.01, 0.3


def wait_until(
    holds: Callable[[], Any],
    otherwise: Callable[[], str] = lambda: "what was waited for does not happen",
    seconds: float = math.inf,
) -> None:
    """Looks ever less often, since each look is work for who is waited for: about a tenth of the wait passes in vain.

    Without `seconds`, pytest's timeout ends what never comes.
    """
    pause, begun = threading.Event(), time.monotonic()
    while not holds():
        waited = time.monotonic() - begun
        assert waited < seconds, otherwise()
        pause.wait(min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, waited / 10)))
