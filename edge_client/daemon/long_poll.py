"""A check-in that the coordinator holds open until there is work."""

from __future__ import annotations

import threading
from typing import Any

from edge_client.daemon.executor import Executor
from edge_client.daemon.wakeup_pipe import WakeupPipe
from edge_client.transport.failures import CertificateExpired, ServerRefused, Unreachable
from edge_client.transport.link import Link
from edge_client.wire.device import CheckIn, CheckInAnswer


class LongPoll:
    """Waits in its own thread, so that the daemon can be woken; `done` once there is an answer."""

    def __init__(self, executor: Executor, link: Link, message: CheckIn, wakeup: WakeupPipe) -> None:
        self.done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None
        arguments = (executor, link, message, wakeup)
        threading.Thread(target=self._check_in, args=arguments, name="poll", daemon=True).start()

    def answer(self) -> tuple[CheckInAnswer, float | None]:
        """Raises the check-in's exception, if it raised one."""
        if self._error is not None:
            raise self._error
        answer: tuple[CheckInAnswer, float | None] = self._result
        return answer

    def _check_in(self, executor: Executor, link: Link, message: CheckIn, wakeup: WakeupPipe) -> None:
        try:
            self._result = executor.check_in(link, message)
        except (Unreachable, ServerRefused, CertificateExpired) as error:
            self._error = error
        except Exception as error:  # the link was closed meanwhile, or a bug: never hang silently
            self._error = Unreachable(f"the check-in failed: {error!r}")
        self.done.set()
        wakeup.set()
