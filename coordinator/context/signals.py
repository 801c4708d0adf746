"""Signals: wake-ups between the device API, the rounds and the event streams of one process.

The database is the source of truth; a signal only says that it may have changed. A signal may therefore be spurious,
and a signal that nobody waits for is dropped. When the process ends, every wait returns immediately.
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
        """Whether the process is ending; then every wait gives up, and fleets raise `Stopped`."""
        return self._closed

    def close(self) -> None:
        """Ends all present and later waits; they return False."""
        with self._changed:
            self._closed = True
            topics = list(self._waiting)
        self.notify(*topics)

    def count_waiting(self, prefix: str) -> int:
        """How many coroutines wait for topics with this prefix."""
        with self._changed:
            return sum(len(waiting) for topic, waiting in self._waiting.items() if topic.startswith(prefix))

    def seen(self, topic: str) -> int:
        """The topic's counter. Read it before the database, then wait until it has increased."""
        with self._changed:
            return self._versions[topic]

    def notify(self, *topics: str) -> None:
        """Wakes everything that waits for these topics. Callable from any thread."""
        with self._changed:
            waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
            for topic in topics:
                self._versions[topic] += 1
                waiting += self._waiting.pop(topic, set())
            self._changed.notify_all()
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    def wait(self, topic: str, seen: int, timeout_seconds: float) -> bool:
        """Blocks a thread until the topic's counter exceeds `seen`; False after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._versions[topic] > seen, timeout_seconds)
            return self._versions[topic] > seen and not self._closed

    async def wait_async(self, topic: str, seen: int, timeout_seconds: float) -> bool:
        """`wait` for a coroutine; blocks no thread."""
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
