"""Signals: wake-ups between the device API, the rounds and the event streams of one process.

The database holds what is true; a signal only says that looking again is worth it. So a signal may be
spurious, and one that nobody waits for is forgotten. When the process ends, every wait ends at once.
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
        self._waiting: defaultdict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(
            set
        )
        self._closed = False

    @property
    def closed(self) -> bool:
        """The process is ending: whoever waits for something gives up, a fleet raises `Stopped`."""
        return self._closed

    def close(self) -> None:
        """Ends every wait, those that come later too; they return False."""
        with self._changed:
            self._closed = True
            topics = list(self._waiting)
        self.notify(*topics)

    def held(self, prefix: str) -> int:
        """How many coroutines wait for topics that begin so."""
        with self._changed:
            return sum(len(waiting) for topic, waiting in self._waiting.items() if topic.startswith(prefix))

    def seen(self, topic: str) -> int:
        """The topic's counter; take it before looking at the database, and wait for it to move on."""
        with self._changed:
            return self._versions[topic]

    def notify(self, *topics: str) -> None:
        """Wakes all who wait. Callable from any thread."""
        with self._changed:
            waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
            for topic in topics:
                self._versions[topic] += 1
                waiting += self._waiting.pop(topic, set())
            self._changed.notify_all()
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    def wait(self, topic: str, seen: int, timeout_seconds: float) -> bool:
        """Blocks a thread until the topic's counter is past `seen`; False when the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._versions[topic] > seen, timeout_seconds)
            return self._versions[topic] > seen and not self._closed

    async def arrive(self, topic: str, seen: int, timeout_seconds: float) -> bool:
        """The same for a coroutine; holds no thread."""
        event = asyncio.Event()
        entry = (asyncio.get_running_loop(), event)
        with self._changed:
            if self._closed or self._versions[topic] > seen:
                return not self._closed
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
        return not self._closed
