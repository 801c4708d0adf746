"""Being asked to make room: SIGTERM to one process, and all stop after the same step, which is then saved.

Processes agree by one number a step, the largest of all, exchanged while the step runs and read after it. So a
training stops at the end of the step after the one in which it was asked.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

PREEMPTED = 75
"""Exit status (EX_TEMPFAIL) of a process that stopped because it was asked to, its work saved."""

REFUSED = 78
"""Exit status (EX_CONFIG) of a process that said what is wrong with its job: a restart would not help."""


class Preemption:
    """Listens for SIGTERM from its making on; every process has one and asks it once a step."""

    def __init__(self) -> None:
        self.asked = False
        # its own group: it works beside the training, whose collectives must not be confused with it
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._exchange: Any = None
        signal.signal(signal.SIGTERM, self._ask)

    def agreed(self) -> bool:
        """Whether this step is the last, the same in all processes."""
        if self._group is None:
            return self.asked
        stop = self._received()
        if not stop:
            self._flag.fill_(int(self.asked))
            self._exchange = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stop

    def close(self) -> None:
        """Takes part in the exchange that is under way; to be called after the last step."""
        self._received()

    def _received(self) -> bool:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return False
        exchange.wait()
        return bool(self._flag.item())

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
