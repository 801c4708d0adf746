"""One version of a model while it is served: its queue, its workers, and what they have done.

A worker has at most two batches, one that it computes and one on its way, which follows only while as many rows wait as it computes
now, so that the queue forms large batches under load and adds no delay without.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from coordinator.errors import Refusal
from coordinator.serving.generations import Generations
from coordinator.serving.inference import Counters
from coordinator.serving.profile import Profile
from coordinator.serving.queue import NEVER, Queue, Waiting
from coordinator.serving.workers import Opening, Worker, WorkerDied, WorkerHost
from edge_client.processes.channel import Frame

_log = structlog.get_logger("fedloop.serving")

ATTEMPTS = 2
"""Workers that one request may end before it is refused."""
HANGS_SECONDS, HANGS_TIMES = 5.0, 50.0
"""A batch that takes longer than this, and than so many times what the profile says, has hung."""
_FORGET_SECONDS = 1.0
"""Without a batch, until observations of batches that make a request seem impossible are forgotten."""


@dataclass
class _Batch:
    items: list[Waiting]
    rows: int
    sent: float
    expected: float
    ends: float  # by the plan


@dataclass(eq=False)
class _Busy:
    """A worker with its batches, by number, the oldest first."""

    worker: Worker
    batches: deque[tuple[int, _Batch]] = field(default_factory=deque)
    free_at: float = 0.0
    is_retiring: bool = False


class ServedVersion:
    """`on_need`: called when requests wait and there is no worker. `loop`: the one that it was made in."""

    def __init__(
        self, number: str, opening: Opening, host: WorkerHost, on_need: Callable[[], None] = lambda: None
    ) -> None:
        self.number = number
        self.opening = opening
        self.facts: dict[str, Any] = {}
        self.counters = Counters()
        self.profile: Profile | None = None
        self.restarts = 0
        self.on_need = on_need
        self.opened_in = 0.0
        self.idle_since = 0.0
        self._host = host
        self._queue = Queue(opening.max_batch)
        self._busy: list[_Busy] = []
        self._starting = 0
        self._number = 0
        self.loop = asyncio.get_running_loop()
        self._is_closed = False
        self._is_dispatching = False
        self._replacements: set[asyncio.Task[None]] = set()
        self.generations = Generations(
            lambda: [each.worker for each in self._busy if not each.is_retiring], self._need
        )

    @property
    def workers(self) -> int:
        """Workers that are ready or start now."""
        return len(self._busy) + self._starting

    @property
    def ready_workers(self) -> int:
        return len(self._busy)

    @property
    def waiting_rows(self) -> int:
        return self._queue.rows

    @property
    def is_idle(self) -> bool:
        return not (self._queue.rows or len(self.generations) or any(each.batches for each in self._busy))

    def pids(self) -> list[int]:
        return [each.worker.pid for each in self._busy]

    def memory_bytes(self) -> int:
        return sum(each.worker.memory_bytes() for each in self._busy)

    def queueing_seconds(self) -> float:
        """How long a request that arrives now would wait, by the profile."""
        if self.profile is None or not self._busy:
            return NEVER if self._queue.rows else 0.0
        now = self.loop.time()
        free = min(max(each.free_at - now, 0.0) for each in self._busy)
        batches, rest = divmod(self._queue.rows, self.opening.max_batch)
        work = batches * self.profile.seconds(self.opening.max_batch) + (
            self.profile.seconds(rest) if rest else 0
        )
        return free + work / len(self._busy)

    async def add_worker(self) -> None:
        """Starts a worker and opens the model in it.

        Raises:
            WorkerDied: it ended. Refusal: 503 `cannot_open`: the model cannot be served; the message says why.
        """
        self._starting += 1
        began = self.loop.time()
        try:
            worker, facts = await self._host.open(self.opening.frame(measures=self.profile is None))
        finally:
            self._starting -= 1
        if self._is_closed:
            worker.close()
            return
        self.opened_in = self.loop.time() - began
        self.facts = facts
        if self.profile is None:
            self.profile = Profile({int(size): value for size, value in facts["seconds"].items()})
        worker.begin(self._answered, self._ended)
        self._busy.append(_Busy(worker))
        self.idle_since = self.loop.time()
        self._queue.set_deadlines(self.loop.time())
        self.dispatch()
        self.generations.resume()

    def remove_worker(self) -> bool:
        """Ends a worker that has nothing to do, if there is one."""
        return any(self._end_if_free(each) for each in list(self._busy))

    def retire_worker(self) -> bool:
        """Ends a worker once it has answered what it has, unless it is the last one that takes more."""
        staying = [each for each in self._busy if not each.is_retiring]
        if len(staying) < 2:
            return False
        chosen = min(staying, key=lambda each: (self.generations.count(each.worker), len(each.batches)))
        chosen.is_retiring = True
        self._end_retired()
        return True

    def _end_retired(self) -> None:
        for each in [each for each in self._busy if each.is_retiring]:
            self._end_if_free(each)

    def _end_if_free(self, busy: _Busy) -> bool:
        if busy.batches or self.generations.count(busy.worker):
            return False
        self._busy.remove(busy)
        busy.worker.close()
        return True

    def submit(self, waiting: Waiting) -> None:
        """Takes a request. `waiting.on_done` follows."""
        now = self.loop.time()
        if not self._busy:
            if waiting.patience:
                waiting.deadline = NEVER
            self._need()
        elif waiting.deadline != NEVER and not self._can_be_in_time(waiting, now):
            _refuse_late([waiting], now)
            return
        self._queue.add(waiting)
        if not self._is_dispatching:  # once for all requests that the loop reads in this turn
            self._is_dispatching = True
            self.loop.call_soon(self._dispatch_soon)

    def dispatch(self) -> None:
        """Gives batches to workers that can take one, and refuses what waits too long."""
        while self._queue.rows and self.profile is not None:
            busy = min(
                self._busy, key=lambda each: (each.is_retiring, len(each.batches), each.free_at), default=None
            )
            if busy is None:
                return
            now = self.loop.time()
            starts = max(now, busy.free_at) if busy.batches else now
            if not self._may_take(busy):
                _refuse_late(self._queue.take_late(starts, self.profile), now)
                return
            items, late = self._queue.take(starts, self.profile, self.profile.margin)
            _refuse_late(late, now)
            if items:
                self._send(busy, items, now, starts)

    def _can_be_in_time(self, waiting: Waiting, now: float) -> bool:
        """By the profile, after all that waits before it. What was observed of batches is forgotten if it let none pass for a while."""
        profile = self.profile
        assert profile is not None
        free = sorted(max(each.free_at, now) for each in self._busy)
        if self._queue.ends(waiting, free, profile, profile.margin) <= waiting.last_end(profile.margin):
            return True
        if not self.is_idle or now - self.idle_since < _FORGET_SECONDS:
            return False
        profile.forget()
        return self._queue.ends(waiting, free, profile) <= waiting.deadline

    def _need(self) -> None:
        """Asks for a worker, unless one is on its way."""
        if not self._starting:
            self.on_need()

    def _dispatch_soon(self) -> None:
        self._is_dispatching = False
        self.dispatch()

    def end_hung(self) -> None:
        """Ends workers whose batch takes far longer than the profile says."""
        now = self.loop.time()
        for each in self._busy:
            if each.batches:
                batch = each.batches[0][1]
                if now - batch.sent > max(HANGS_SECONDS, HANGS_TIMES * batch.expected):
                    _log.error("worker_hangs", version=self.number, pid=each.worker.pid, rows=batch.rows)
                    each.worker.kill()

    async def drain(self, seconds: float) -> None:
        """Waits until nothing is left to answer, at most so long, and ends all workers."""
        until = self.loop.time() + seconds
        while not self.is_idle and self.loop.time() < until:
            await asyncio.sleep(0.02)
        self.close()

    def close(self) -> None:
        """Ends all workers, and refuses what still waits."""
        self._is_closed = True
        for task in self._replacements:
            task.cancel()
        for each in self._busy:
            each.worker.close()
            for _, batch in each.batches:
                for item in batch.items:
                    item.on_done(_draining(), 0.0, 0.0)
        self._busy = []
        self.refuse_all(_draining())

    def refuse_all(self, refusal: Refusal) -> None:
        """Refuses what waits, and texts that are not complete."""
        self.generations.refuse_all(refusal)
        for each in self._queue.drain():
            each.on_done(refusal, self.loop.time() - each.arrived, 0.0)

    def _may_take(self, busy: _Busy) -> bool:
        if busy.is_retiring or not busy.batches:
            return not busy.is_retiring
        return len(busy.batches) == 1 and self._queue.rows >= busy.batches[0][1].rows

    def _send(self, busy: _Busy, items: list[Waiting], now: float, starts: float) -> None:
        assert self.profile is not None
        rows = sum(each.rows for each in items)
        expected = self.profile.seconds(rows)
        self._number += 1
        busy.batches.append((self._number, _Batch(items, rows, starts, expected, starts + expected)))
        busy.free_at = starts + expected
        busy.worker.infer(self._number, rows, [each.x.tobytes() for each in items])

    def _answered(self, worker: Worker, frame: Frame) -> None:
        if (events := frame.values.get("events")) is not None:
            self.generations.deliver(events)
            self.idle_since = self.loop.time()
            self._end_retired()
            return
        busy = next(each for each in self._busy if each.worker is worker)
        number, batch = busy.batches.popleft()
        assert number == frame.values["id"], "answers come in the order of the batches"
        now = self.loop.time()
        busy.free_at = now + (busy.batches[0][1].expected if busy.batches else 0.0)
        if busy.batches:
            busy.batches[0][1].sent = now
        else:
            self.idle_since = now
            self._end_retired()
        if "error" in frame.values:
            self.dispatch()
            self._fail(batch, frame.values["error"], now)
            return
        seconds = frame.values["seconds"]
        assert self.profile is not None
        self.profile.observe(batch.rows, max(now - batch.sent, seconds))
        self.dispatch()  # before the answers: the worker computes while they are written
        logits: npt.NDArray[np.float32] = np.frombuffer(frame.blobs[0], np.float32)
        queued = [max(batch.sent - item.arrived, 0.0) for item in batch.items]
        totals = [now - item.arrived for item in batch.items]
        self.counters = self.counters.after(batch.rows, seconds, queued, totals, time.time())
        logits = logits.reshape(batch.rows, *self.facts["output_shape"])
        at = 0
        for item, waited in zip(batch.items, queued, strict=True):
            item.on_done(logits[at : at + item.rows], waited, seconds)
            at += item.rows
        self.loop.call_soon(self._written, batch)

    def _written(self, batch: _Batch) -> None:
        """The answers of a batch have been written."""
        assert self.profile is not None
        self.profile.observe_lateness(self.loop.time() - batch.ends, batch.rows)

    def _fail(self, batch: _Batch, message: str, now: float) -> None:
        """A batch has raised: each of its requests is tried by itself, and one that raises alone is answered with why."""
        if len(batch.items) > 1:
            for item in batch.items:
                item.attempts = max(item.attempts, 1)
                self._queue.add(item)
            self.dispatch()
            return
        self.counters = replace(self.counters, failed=self.counters.failed + 1)
        refusal = Refusal(500, "model_failed", f"the model failed: {message}")
        batch.items[0].on_done(refusal, now - batch.items[0].arrived, 0.0)

    def _ended(self, worker: Worker) -> None:
        """A worker has ended by itself: another takes its place, and what it had is done again."""
        busy = next((each for each in self._busy if each.worker is worker), None)
        if busy is None or self._is_closed:
            return
        self._busy.remove(busy)
        self.restarts += 1
        _log.warning("worker_ended", version=self.number, pid=worker.pid, batches=len(busy.batches))
        now = self.loop.time()
        for place, (_, batch) in enumerate(busy.batches):
            for item in batch.items:
                item.attempts += not place  # the first batch was being computed
                if item.attempts >= ATTEMPTS:
                    self.counters = replace(self.counters, failed=self.counters.failed + 1)
                    text = f"{ATTEMPTS} workers have ended while they computed this request"
                    item.on_done(Refusal(500, "worker_died", text), now - item.arrived, 0.0)
                else:
                    self._queue.add(item)
        self._starting += 1  # from now on, so that no other is started in its place before the task begins
        task = self.loop.create_task(self._replace())
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)
        self.generations.lost(worker)
        self.dispatch()

    async def _replace(self) -> None:
        """Starts a worker in the place of one that has ended, which is already counted as starting."""
        self._starting -= 1
        try:
            await self.add_worker()
        except (WorkerDied, Refusal) as error:
            _log.error("worker_not_replaced", version=self.number, reason=str(error)[:500])
            if not self._busy:
                self.refuse_all(Refusal(503, "not_ready", f"no worker can be started: {error}"))


def _refuse_late(late: Sequence[Waiting], now: float) -> None:
    for each in late:
        text = "the answer would come after the time limit of the request"
        each.on_done(Refusal(504, "deadline", text), now - each.arrived, 0.0)


def _draining() -> Refusal:
    return Refusal(503, "draining", "this version ends now; send the request again", retry_after_seconds=1)
