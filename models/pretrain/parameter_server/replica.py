"""A server: takes contributions, makes updates, passes them on to its backups, and replies.

An update is applied here, then by the next replica, which passes it on in turn (van Renesse 2004, chain replication),
and only then do workers receive it: what a worker has seen survives as long as one replica does. A backup that a worker
turns to leads from then on and accepts no updates from the replicas before it. If one of those still lives, its next
update is refused; it then answers nobody, and its workers fail over.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed.rpc as rpc
from torch.futures import Future

from models.pretrain.parameter_server.rules import Contribution, Rule
from models.pretrain.parameter_server.shard import Shard, Tensors, mean


@dataclass(frozen=True)
class Reply:
    """What a worker continues with: `clock`, and `values` of the shard's params after `version` updates."""

    clock: int
    version: int
    values: Tensors


@dataclass(frozen=True)
class Update:
    """What a backup needs to follow: the mean gradients, and who contributed. `version` includes this update."""

    version: int
    contributions: list[Contribution]
    gradients: Tensors


class Replica:
    """One server of a shard.

    Args:
        successors: names of the replicas after this one.
        leads: whether it is the first.
    """

    def __init__(
        self, shard: Shard, rule: Rule, workers: int, successors: Sequence[str], leads: bool, timeout: float
    ) -> None:
        self.shard, self.rule, self.workers, self.leads, self.timeout = shard, rule, workers, leads, timeout
        self.successors = list(successors)
        self.deposed = False
        self.staleness, self.leads_by = Counter[int](), Counter[int]()
        self.losses: dict[int, list[float]] = defaultdict(list)
        self.all_left = threading.Event()
        self._left: set[int] = set()
        self._waiting: dict[int, Future[Reply | None]] = {}
        self._waiting_for_end: list[Future[Reply | None]] = []
        self._lock = threading.Lock()

    def push(self, contribution: Contribution) -> Future[Reply | None]:
        """Replies as soon as the worker may continue; with None where another replica leads.

        Raises:
            ValueError: no such worker, or gradients of other shapes than this shard's params; nothing is changed.
            RuntimeError: the worker has seen updates that this replica has missed.
        """
        self._validate(contribution)
        future: Future[Reply | None] = Future()
        with self._lock:
            self.leads = True  # from a worker's first call on
            if not self.deposed:
                if contribution.version > self.shard.version:
                    raise RuntimeError(
                        f"worker {contribution.worker} knows of update {contribution.version}, this replica of "
                        f"{self.shard.version}: it was given up before and has missed updates"
                    )
                self.rule.offer(contribution)
            self._waiting[contribution.worker] = future
            while not self.deposed and (ready := self.rule.next()):
                self._update(ready)
            self._reply()
        return future

    def final(self) -> Future[Reply | None]:
        """Replies when all updates are made; with None where another replica leads."""
        future: Future[Reply | None] = Future()
        with self._lock:
            self.leads = True
            self._waiting_for_end.append(future)
            self._reply()
        return future

    def follow(self, update: Update) -> bool:
        """Applies an update of the previous replica; False if this one leads."""
        with self._lock:
            if self.leads:
                return False
            if update.version <= self.shard.version:  # already received before a replica in between died
                return True
            self._apply(update)
            return self._forward(update)

    def leave(self, worker: int) -> None:
        """Notes that the worker will not push again; sets `all_left` once no worker will."""
        self._require_worker(worker)
        self._left.add(worker)
        if len(self._left) == self.workers:
            self.all_left.set()

    def record(self) -> dict[str, Any]:
        """Statistics so far.

        `staleness`: updates made while a gradient was computed -> count. `lead`: steps that a worker was ahead of the
        slowest when it was allowed to continue -> count. `losses`: mean of every step. `dropped`, `updates`;
        `backups` that still follow.
        """
        with self._lock:
            return {
                "updates": self.shard.version,
                "dropped": self.rule.dropped,
                "staleness": dict(sorted(self.staleness.items())),
                "lead": dict(sorted(self.leads_by.items())),
                "backups": len(self.successors),
                "losses": [sum(losses) / len(losses) for _, losses in sorted(self.losses.items())],
            }

    def _validate(self, contribution: Contribution) -> None:
        worker, clock = contribution.worker, contribution.clock
        self._require_worker(worker)
        if not 0 <= clock < self.shard.steps:
            raise ValueError(
                f"worker {worker} pushes for batch {clock}, expected 0 to {self.shard.steps - 1}"
            )
        shapes = [tuple(gradient.shape) for gradient in contribution.gradients]
        expected = [tuple(parameter.shape) for parameter in self.shard.parameters]
        if shapes != expected:
            raise ValueError(f"worker {worker} pushes gradients of shapes {shapes}, expected {expected}")

    def _require_worker(self, worker: int) -> None:
        if not 0 <= worker < self.workers:
            raise ValueError(f"there is no worker {worker!r}, expected 0 to {self.workers - 1}")

    def _update(self, contributions: list[Contribution]) -> None:
        gradients = mean([contribution.gradients for contribution in contributions])
        bare = [replace(contribution, gradients=()) for contribution in contributions]
        update = Update(self.shard.version + 1, bare, gradients)
        self._apply(update)
        self.deposed = not self._forward(update)

    def _apply(self, update: Update) -> None:
        for contribution in update.contributions:
            self.staleness[self.shard.version - contribution.version] += 1
            self.losses[contribution.clock].append(contribution.loss)
        # a copy, because clipping changes the gradients and a backup must get the original ones
        self.shard.apply([gradient.clone() for gradient in update.gradients])
        self.rule.applied(update.contributions)

    def _forward(self, update: Update) -> bool:
        """Sends the update to the next living replica; False if that one leads."""
        while self.successors:
            try:
                return bool(rpc.rpc_sync(self.successors[0], follow, args=(update,), timeout=self.timeout))
            except RuntimeError as error:
                if is_remote_error(error):
                    raise
                self.successors.pop(0)
        return True

    def _reply(self) -> None:
        """Replies to every worker that need not wait any more; with None to all once deposed."""
        values: Tensors | None = None
        for worker in list(self._waiting):
            clock = self.rule.next_clock(worker)
            if self.deposed:
                self._waiting.pop(worker).set_result(None)
            elif clock is not None:
                self.leads_by[self.rule.lead(worker)] += 1
                values = values or self.shard.values()
                self._waiting.pop(worker).set_result(Reply(clock, self.shard.version, values))
        if self.deposed or self.rule.finished(self.shard.steps):
            for future in self._waiting_for_end:
                done = Reply(self.shard.steps, self.shard.version, self.shard.values())
                future.set_result(None if self.deposed else done)
            self._waiting_for_end.clear()


def is_remote_error(error: RuntimeError) -> bool:
    """Whether the other process replied with an error of its own, rather than being gone."""
    return "On WorkerInfo" in str(error)


# RPC calls functions by name; these use the replica of their process.

_own: list[Replica] = []


def register(replica: Replica) -> None:
    """Makes this process answer for `replica`; call it before the process joins."""
    _own[:] = [replica]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(contribution: Contribution) -> Future[Reply | None]:
    return _own[0].push(contribution)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def final() -> Future[Reply | None]:
    return _own[0].final()


def follow(update: Update) -> bool:
    return _own[0].follow(update)


def leave(worker: int) -> None:
    _own[0].leave(worker)


def record() -> dict[str, Any]:
    return _own[0].record()
