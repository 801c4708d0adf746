"""Prefetching: a thread reads the next batches while the processor trains on this one; stalls are measured.

It does not change what a step trains on: a batch is a function of its step, whenever it is read. A thread and the
training share one interpreter, and handing a batch over can take longer than reading it: batches that are read in less
than a millisecond are read on request.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from models.job import JobFile
from models.pretrain.data.batches import Batch, Batches

WORTH_SECONDS = 1e-3
"""Of reading a batch, from which on a processor that also trains reads ahead."""

_READS = 8


class Loader(Batches):
    """Batches in the order of their steps, up to `depth` of them read ahead; with 0 each is read on request.

    A request for another step than the next, or with another share, starts over from there. An error of the thread is
    raised when its batch is requested. The thread ends with `close`, or with the process.

    Args:
        worth_seconds: the thread starts when the median of the last reads on request took so long; 0: at once.

    Attributes:
        waited_seconds: total time callers have waited for batches.
    """

    def __init__(
        self, batches: Batches, depth: int, *, pinned: bool = False, worth_seconds: float = 0.0
    ) -> None:
        super().__init__(batches.source, batches.batch_size, batches.seed, batches.share)
        self.depth, self.pinned, self.worth_seconds = depth, pinned, worth_seconds
        self._read_seconds: deque[float] = deque(maxlen=_READS)
        self.waited_seconds = 0.0
        self._reported_seconds = 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()
        self._next = (-1, self.share)

    def __getitem__(self, step: int) -> Batch:
        began = time.perf_counter()
        batch = self._take(step) if (ahead := self._reads_ahead()) else self._read(step)
        seconds = time.perf_counter() - began
        self.waited_seconds += seconds
        if not ahead:
            self._read_seconds.append(seconds)
        return batch

    def _reads_ahead(self) -> bool:
        if not self.depth or not self.worth_seconds or self._thread is not None:
            return self.depth > 0
        reads = self._read_seconds
        return len(reads) == _READS and statistics.median(reads) >= self.worth_seconds

    def stall_share(self, seconds: float) -> float:
        """Share of `seconds`, the time since the last call, that callers waited."""
        waited = self.waited_seconds - self._reported_seconds
        self._reported_seconds = self.waited_seconds
        return min(1.0, waited / seconds) if seconds > 0 else 0.0

    def close(self) -> None:
        """Ends the thread; the next request starts another."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        self._ahead.clear()

    def _take(self, step: int) -> Batch:
        if self._thread is None or self._next != (step, self.share):
            self.close()
            self._thread = ThreadPoolExecutor(1, "batches", torch.set_num_threads, (1,))
        self._next = step + 1, self.share
        while len(self._ahead) <= self.depth:
            self._ahead.append(self._thread.submit(self._read, step + len(self._ahead)))
        return self._ahead.popleft().result()

    def _read(self, step: int) -> Batch:
        batch = super().__getitem__(step)
        return replace(batch, x=batch.x.pin_memory(), y=batch.y.pin_memory()) if self.pinned else batch


def from_job(job: JobFile, batches: Batches, device: torch.device) -> Loader:
    """A loader with the job's `prefetch`: how many batches are read ahead, 2 by default.

    Raises:
        JobError: not a whole number from 0 to 1024.
    """
    depth = int(job.number("prefetch", 2, 0, 1024))
    gpu = device.type == "cuda"  # it computes while this process reads
    return Loader(batches, depth, pinned=gpu, worth_seconds=0.0 if gpu else WORTH_SECONDS)
