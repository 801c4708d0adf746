"""Prefetching: a thread reads the next batches while the processor trains on this one; stalls are measured.

It does not change what a step trains on: a batch is a function of its step, whenever it is read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from models.job import Job, JobError
from models.pretrain.data.batches import Batch, Batches, Share

MAX_DEPTH = 1024


class Loader(Batches):
    """Batches in the order of their steps, up to `depth` of them read ahead; with 0 each is read on request.

    A request for another step than the next, or with another share, starts over from there. An error of the thread is
    raised when its batch is requested. The thread ends with `close`, or with the process.

    Attributes:
        waited_seconds: total time callers have waited for batches.
    """

    def __init__(self, batches: Batches, depth: int, *, pinned: bool = False) -> None:
        super().__init__(batches.source, batches.batch_size, batches.seed, batches.share)
        self.depth, self.pinned = depth, pinned
        self.waited_seconds = 0.0
        self._reported_seconds = 0.0
        self._ahead: _ReadAhead | None = None

    def __getitem__(self, step: int) -> Batch:
        began = time.perf_counter()
        batch = self._next(step) if self.depth else self._read(step)
        self.waited_seconds += time.perf_counter() - began
        return batch

    def stall_share(self, seconds: float) -> float:
        """Share of `seconds`, the time since the last call, that callers waited."""
        waited = self.waited_seconds - self._reported_seconds
        self._reported_seconds = self.waited_seconds
        return min(1.0, waited / seconds) if seconds > 0 else 0.0

    def close(self) -> None:
        """Ends the thread; the next request starts another."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def _next(self, step: int) -> Batch:
        if self._ahead is None or (self._ahead.step, self._ahead.share) != (step, self.share):
            self.close()
            self._ahead = _ReadAhead(self._read, step, self.depth, self.share)
        return self._ahead.take()

    def _read(self, step: int) -> Batch:
        batch = super().__getitem__(step)
        return replace(batch, x=batch.x.pin_memory(), y=batch.y.pin_memory()) if self.pinned else batch


class _ReadAhead:
    """A thread that reads batches from `step` on; `step` is always the next batch to return."""

    def __init__(self, read: Callable[[int], Batch], step: int, depth: int, share: Share) -> None:
        self.step, self.share, self._read, self._depth = step, share, read, depth
        self._ready: deque[Batch | BaseException] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(step,), name="batches", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            batch = self._ready[0]
            if isinstance(batch, BaseException):
                raise batch
            self._ready.popleft()
            self.step += 1
            self._changed.notify_all()
            return batch

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self, step: int) -> None:
        torch.set_num_threads(1)
        result: Batch | BaseException
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                if self._stopped:
                    return
            try:
                result = self._read(step)
            except BaseException as error:
                result = error
            with self._changed:
                self._ready.append(result)
                self._changed.notify_all()
            if isinstance(result, BaseException):
                return
            step += 1


def from_job(job: Job, batches: Batches, device: torch.device) -> Loader:
    """A loader with the job's `prefetch`: how many batches are read ahead, 2 by default.

    Raises:
        JobError: not a whole number from 0 to 1024.
    """
    depth = job.settings.get("prefetch", 2)
    if not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= MAX_DEPTH:
        raise JobError(f"{job.path}: prefetch is {depth!r}, expected a whole number from 0 to {MAX_DEPTH}")
    return Loader(batches, depth, pinned=device.type == "cuda")
