"""Signals: wake-ups between the device API, the rounds and the event streams of one process.

The database holds what is true; a signal only says that looking again is worth it. So a signal may be
spurious, and one that nobody waits for is forgotten.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict


class Signals:
    """Topics are short strings, such as `device:<id>`, `run:<id>` or `events`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._versions: defaultdict[str, int] = defaultdict(int)
        self._waiting: defaultdict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(set)

    def seen(self, topic: str) -> int:
        """The topic's counter; take it before looking at the database, and wait for it to move on."""
        with self._changed:
            return self._versions[topic]

    def notify(self, *topics: str) -> None:
        """Wakes all who wait. Callable from any thread."""
        with self._changed:
            waiting = []
            for topic in topics:
                self._versions[topic] += 1
                waiting += self._waiting.pop(topic, set())
            self._changed.notify_all()
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    def wait(self, topic: str, seen: int, timeout_seconds: float) -> bool:
        """Blocks a thread until the topic's counter is past `seen`; False when the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: self._versions[topic] > seen, timeout_seconds)

    async def arrive(self, topic: str, seen: int, timeout_seconds: float) -> bool:
        """The same for a coroutine; holds no thread."""
        event = asyncio.Event()
        entry = (asyncio.get_running_loop(), event)
        with self._changed:
            if self._versions[topic] > seen:
                return True
            self._waiting[topic].add(entry)
        try:
            await asyncio.wait_for(event.wait(), timeout_seconds)
        except TimeoutError:
            return False
        finally:
            with self._changed:
                self._waiting[topic].discard(entry)
                if not self._waiting[topic]:
                    del self._waiting[topic]
        return True
