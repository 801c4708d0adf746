"""A pool of worker processes that lives as long as the simulation.

Each worker is one single-threaded process of `coordinator.simulation.worker`, connected by a socket pair.
It dies with its parent, whatever kills that, and leaves nothing behind: no shared memory, no files of its
own but the log. At most two jobs lie with a worker, one running and one waiting, so that it never idles.

Several workers are forked from one process that has imported what they need (`edge_client.nursery`).
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coordinator.errors import UserError
from coordinator.simulation import frames
from coordinator.simulation.frames import Frame
from edge_client.nursery import Forked, Nursery
from edge_client.process import Launch

WAITING = 2
"""Jobs given to one worker at a time."""

TORCH = ("models.zoo", "edge_client.train.torch_trainer")
"""What workers import that build, train or score models of torch."""

_WORKER = "coordinator.simulation.worker"
_TAIL_BYTES = 65_536


class WorkerDied(Exception):
    """A worker process ended by itself; the message holds the end of its log."""


@dataclass(frozen=True)
class Job:
    """Work for any one worker. `key` is the caller's own, to tell replies apart."""

    key: Any
    values: dict[str, Any]
    blobs: tuple[bytes, ...] = ()


@dataclass
class _Worker:
    process: subprocess.Popen[bytes] | Forked
    channel: socket.socket
    jobs: deque[tuple[int, Job | None]] = field(default_factory=deque)


class WorkerPool:
    """`size` workers; use as a context manager. `modules`: what several of them import once, together."""

    def __init__(
        self, size: int, log: Path, modules: Sequence[str] = (), launch: Launch | None = None
    ) -> None:
        self._log = log
        self._launch = launch or Launch()
        self._nursery: Nursery | None = None
        self._batch = 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        with log.open("ab") as file:
            if size > 1:
                self._nursery = Nursery([_WORKER, *modules], file.fileno(), self._launch)
            for _ in range(size):
                self._workers.append(self._start(file.fileno()))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """Ends and reaps every worker."""
        for worker in self._workers:
            worker.channel.close()
        if self._nursery is not None:
            self._nursery.close()
        else:
            for worker in self._workers:
                worker.process.kill()
                worker.process.wait()
        self._selector.close()
        self._workers = []

    def tell(self, values: dict[str, Any], blobs: Sequence[bytes] = (), file: int | None = None) -> None:
        """Sends every worker something it keeps for the jobs that follow; there is no reply. `file`: one to read."""
        for worker in self._workers:
            self._send(worker, {**values, "tell": True}, blobs, file)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Frame]]:
        """Replies as they come, in any order. Jobs are drawn from `jobs` when a worker is free for one.

        Closing the iterator abandons the jobs still running; their replies are dropped.

        Raises:
            UserError: a job found the user's input wrong.
            WorkerDied: a worker is gone.
        """
        self._batch += 1
        source = iter(jobs)
        outstanding = 0
        exhausted = False
        while True:
            while not exhausted and (worker := self._free()) is not None:
                job = next(source, None)
                if job is None:
                    exhausted = True
                    break
                worker.jobs.append((self._batch, job))
                self._send(worker, job.values, job.blobs)
                outstanding += 1
            if exhausted and not outstanding:
                return
            for batch, done, reply in self._replies():
                if batch == self._batch:
                    outstanding -= 1
                    yield done, reply

    def one(self, values: dict[str, Any], blobs: tuple[bytes, ...] = ()) -> Frame:
        """The reply to a single job."""
        ((_, reply),) = self.run([Job(None, values, blobs)])
        return reply

    def _start(self, log: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._process(theirs.fileno(), log)
        worker = _Worker(process, ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _process(self, channel: int, log: int) -> subprocess.Popen[bytes] | Forked:
        if self._nursery is not None:
            return self._nursery.start(_WORKER, output=log, inherit=[channel])
        return subprocess.Popen(
            self._launch.command("-m", _WORKER, str(channel)),
            pass_fds=[channel],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._launch.environment(),
        )

    def _free(self) -> _Worker | None:
        worker = min(self._workers, key=lambda each: len(each.jobs))
        return worker if len(worker.jobs) < WAITING else None

    def _replies(self) -> Iterator[tuple[int, Job, Frame]]:
        for key, _ in self._selector.select():
            worker: _Worker = key.data
            reply = self._receive(worker)
            batch, job = worker.jobs.popleft()
            assert job is not None
            if "error" in reply.values:
                if batch != self._batch:
                    continue
                raise UserError(reply.values["error"])
            yield batch, job, reply

    def _send(
        self, worker: _Worker, values: dict[str, Any], blobs: Sequence[bytes], file: int | None = None
    ) -> None:
        try:
            frames.send(worker.channel, values, blobs, file)
        except frames.Closed:
            raise self._died(worker) from None

    def _receive(self, worker: _Worker) -> Frame:
        try:
            return frames.receive(worker.channel)
        except frames.Closed:
            raise self._died(worker) from None

    def _died(self, worker: _Worker) -> WorkerDied:
        status = worker.process.wait()
        with self._log.open("rb") as file:  # a worker may have written without end
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()[-8:]
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return WorkerDied(f"a worker process ended with {how}; the end of {self._log}:\n" + "\n".join(tail))
