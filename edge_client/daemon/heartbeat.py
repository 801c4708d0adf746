"""Check-ins in background threads: they renew a task's lease, or wait for work and wake the daemon."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace

from edge_client.daemon.executor import Executor
from edge_client.transport.failures import CertificateExpired, ServerRefused, Unreachable
from edge_client.transport.link import Link, parse_answer
from edge_client.wire.device import CheckIn, CheckInAnswer, beat_seconds


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


@contextmanager
def heartbeat(link: Link, message: CheckIn, lease_seconds: float) -> Iterator[threading.Event]:
    """Checks in for a task every `beat_seconds` of its lease, in a thread of its own, for the time of the block.

    The event is set once the coordinator no longer wants the result.
    """
    closed, unwanted = threading.Event(), threading.Event()
    seconds = beat_seconds(lease_seconds)
    beat = replace(message, wait_seconds=0.0)

    def check_in() -> None:
        while not closed.wait(seconds):
            try:
                answer = parse_answer(CheckInAnswer, link.post("/checkin", beat))
            except (Unreachable, ServerRefused):
                continue  # the work may still be wanted; the next beat or the delivery will tell
            except Exception:
                return  # the link was closed meanwhile
            if answer.stop:
                unwanted.set()
                return

    threading.Thread(target=check_in, name="heartbeat", daemon=True).start()
    try:
        yield unwanted
    finally:
        # Not joined: a beat may wait for a dead connection for a minute, and its answer no longer matters.
        closed.set()


def long_poll(
    executor: Executor, link: Link, message: CheckIn, wakeup: WakeupPipe
) -> Future[tuple[CheckInAnswer, float | None]]:
    """Checks in and waits in a thread of its own, so that the daemon can be woken; its result also wakes it."""
    future: Future[tuple[CheckInAnswer, float | None]] = Future()

    def check_in() -> None:
        try:
            future.set_result(executor.check_in(link, message))
        except (Unreachable, ServerRefused, CertificateExpired) as error:
            future.set_exception(error)
        except Exception as error:  # the link was closed meanwhile, or a bug: never hang silently
            future.set_exception(Unreachable(f"the check-in failed: {error!r}"))
        wakeup.set()

    threading.Thread(target=check_in, name="poll", daemon=True).start()
    return future
