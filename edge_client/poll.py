"""A check-in that the coordinator keeps waiting until there is work."""

from __future__ import annotations

import threading
from typing import Any

from edge_client.execute import Executor
from edge_client.failures import CertificateExpired, ServerRefused, Unreachable
from edge_client.link import Link
from edge_client.wake import Wake
from edge_client.wire.device import CheckIn, CheckInAnswer


class Poll:
    """Waits in a thread of its own, so that the daemon can be woken; `done` once there is an answer."""

    def __init__(self, executor: Executor, link: Link, message: CheckIn, wake: Wake) -> None:
        self.done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None
        arguments = (executor, link, message, wake)
        threading.Thread(target=self._ask, args=arguments, name="poll", daemon=True).start()

    def answer(self) -> tuple[CheckInAnswer, float | None]:
        """Raises what the check-in raised."""
        if self._error is not None:
            raise self._error
        answer: tuple[CheckInAnswer, float | None] = self._result
        return answer

    def _ask(self, executor: Executor, link: Link, message: CheckIn, wake: Wake) -> None:
        try:
            self._result = executor.check_in(link, message)
        except (Unreachable, ServerRefused, CertificateExpired) as error:
            self._error = error
        except Exception as error:  # the link was closed below it, or a fault of ours: never a silent hang
            self._error = Unreachable(f"the check-in broke off: {error!r}")
        self.done.set()
        wake.set()
