"""Preemption: on SIGTERM to one process, all processes stop after the same step, which is then saved.

Processes agree by an all-reduce of one flag a step, its maximum, exchanged while the step runs and read after it. So
a training stops at the end of the step after the one in which the signal came.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Preemption:
    """Handles SIGTERM from its creation on; every process has one and calls `should_stop` once a step."""

    def __init__(self) -> None:
        self.requested = False
        # its own group: it runs next to the training, whose collectives must not be mixed up with it
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._exchange: Any = None
        signal.signal(signal.SIGTERM, self._on_signal)

    def should_stop(self) -> bool:
        """Whether this step is the last, the same in all processes."""
        if self._group is None:
            return self.requested
        stop = self.complete()
        if not stop:
            self._flag.fill_(int(self.requested))
            self._exchange = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stop

    def complete(self) -> bool:
        """Completes the all-reduce in flight, if any; whether a process asked to stop. Call it after the last step."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return False
        exchange.wait()
        return bool(self._flag.item())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
