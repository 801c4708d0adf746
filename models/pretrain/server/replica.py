"""A server: takes contributions, makes updates, hands them on to its backups, and answers.

An update is applied here, then by the next replica, which hands it on in turn (van Renesse 2004, chain replication),
and only then do workers hear of it: what a worker knows of outlives any replica but the last. A backup that a worker
turns to leads from then on and takes no more from the replicas before it; one of those that still lives learns of
that with its next update, answers nobody any more, and its workers follow.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed.rpc as rpc
from torch.futures import Future

from models.pretrain.server.rules import Contribution, Rule
from models.pretrain.server.shard import Shard, Tensors, mean


@dataclass(frozen=True)
class Reply:
    """What a worker goes on with: `clock`, and `values` of the shard's params after `version` updates."""

    clock: int
    version: int
    values: Tensors


@dataclass(frozen=True)
class Update:
    """What a backup needs in order to follow: the mean gradients, and who contributed. `version` counts it in."""

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
        self.left = threading.Event()
        self._gone: set[int] = set()
        self._waiting: dict[int, Future[Reply | None]] = {}
        self._watching: list[Future[Reply | None]] = []
        self._lock = threading.Lock()

    def push(self, contribution: Contribution) -> Future[Reply | None]:
        """Answers as soon as the worker may go on; with None where another replica leads."""
        future: Future[Reply | None] = Future()
        with self._lock:
            if self._led():
                if contribution.version > self.shard.version:
                    raise RuntimeError(
                        f"worker {contribution.worker} knows of update {contribution.version}, this replica of "
                        f"{self.shard.version}: it was given up before and has missed updates"
                    )
                self._waiting[contribution.worker] = future
                self.rule.offer(contribution)
                while not self.deposed and (ready := self.rule.next()):
                    self._make(ready)
                self._answer()
            else:
                future.set_result(None)
        return future

    def final(self) -> Future[Reply | None]:
        """Answers when all updates were made; with None where another replica leads."""
        future: Future[Reply | None] = Future()
        with self._lock:
            if self._led():
                self._watching.append(future)
                self._answer()
            else:
                future.set_result(None)
        return future

    def follow(self, update: Update) -> bool:
        """Makes an update that the replica before has made; False if this one leads."""
        with self._lock:
            if self.leads:
                return False
            if update.version <= self.shard.version:  # from the one before the one that died
                return True
            self._keep(update)
            return self._hand_on(update)

    def leave(self, worker: int) -> None:
        """The worker will not push again; `left` is set when all have said so."""
        self._gone.add(worker)
        if len(self._gone) == self.workers:
            self.left.set()

    def record(self) -> dict[str, Any]:
        """What happened so far.

        `staleness`: updates made while a gradient was computed -> how often. `lead`: steps that a worker was ahead of
        the slowest when it was let go on -> how often. `losses`: mean of every step. `dropped`, `updates`; `backups`
        that still follow.
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

    def _led(self) -> bool:
        """Whether this replica answers workers: it does from the first time that one asks, until deposed."""
        self.leads = True
        return not self.deposed

    def _make(self, contributions: list[Contribution]) -> None:
        gradients = mean([contribution.gradients for contribution in contributions])
        bare = [replace(contribution, gradients=()) for contribution in contributions]
        update = Update(self.shard.version + 1, bare, gradients)
        self._keep(update)
        self.deposed = not self._hand_on(update)

    def _keep(self, update: Update) -> None:
        for contribution in update.contributions:
            self.staleness[self.shard.version - contribution.version] += 1
            self.losses[contribution.clock].append(contribution.loss)
        # a copy: clipping changes them, and a backup must get them as they were
        self.shard.apply([gradient.clone() for gradient in update.gradients])
        self.rule.made(update.contributions)

    def _hand_on(self, update: Update) -> bool:
        """Has the next living replica follow; False if that one leads."""
        while self.successors:
            try:
                return bool(rpc.rpc_sync(self.successors[0], follow, args=(update,), timeout=self.timeout))
            except RuntimeError as error:
                if failed_there(error):
                    raise
                self.successors.pop(0)
        return True

    def _answer(self) -> None:
        """Answers everybody who need not wait any more."""
        reply: Tensors | None = None
        for worker, future in list(self._waiting.items()):
            clock = self.rule.goes_on(worker)
            if clock is None and not self.deposed:
                continue
            del self._waiting[worker]
            if self.deposed:
                future.set_result(None)
                continue
            assert clock is not None
            self.leads_by[self.rule.lead(worker)] += 1
            reply = reply or self.shard.values()
            future.set_result(Reply(clock, self.shard.version, reply))
        if self.deposed or self.rule.finished(self.shard.steps):
            for future in self._watching:
                done = Reply(self.shard.steps, self.shard.version, self.shard.values())
                future.set_result(None if self.deposed else done)
            self._watching.clear()


def failed_there(error: RuntimeError) -> bool:
    """Whether the other process answered, with an error of its own; else it is gone."""
    return "On WorkerInfo" in str(error)


# RPC calls functions by name; these find the replica that their process keeps.

_kept: list[Replica] = []


def keep(replica: Replica) -> None:
    """Has this process answer for `replica`, before it joins."""
    _kept[:] = [replica]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(contribution: Contribution) -> Future[Reply | None]:
    return _kept[0].push(contribution)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def final() -> Future[Reply | None]:
    return _kept[0].final()


def follow(update: Update) -> bool:
    return _kept[0].follow(update)


def leave(worker: int) -> None:
    _kept[0].leave(worker)


def record() -> dict[str, Any]:
    return _kept[0].record()
