"""A pool of worker processes that lives as long as the simulation.

Each worker is one single-threaded process of `coordinator.workers.worker`, connected by a socket pair. It dies with its
parent and leaves nothing behind: no shared memory and, except for the log, no files. A worker has at most two jobs, one
running and one queued, so that it never idles.

If there are several workers, they are forked from one process that has imported what they need
(`edge_client.processes.forkserver`).
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

from coordinator.errors import StorageFailed, UserError
from coordinator.workers import frames
from coordinator.workers.frames import Frame
from edge_client.processes.forkserver import ForkedWorker, ForkServer
from edge_client.processes.process import Launch

JOBS_PER_WORKER = 2
"""Jobs that one worker has at a time."""

TORCH = ("models.zoo", "edge_client.train.torch_trainer")
"""Modules that workers for torch models import."""

_WORKER = "coordinator.workers.worker"
_TAIL_BYTES = 65_536


class WorkerDied(Exception):
    """A worker process ended unexpectedly; the message holds the end of its log."""


@dataclass(frozen=True)
class Job:
    """Work for one worker, whichever is idle. The caller recognises the reply by `key`."""

    key: Any
    values: dict[str, Any]
    blobs: tuple[bytes, ...] = ()


@dataclass
class _Worker:
    process: subprocess.Popen[bytes] | ForkedWorker
    channel: socket.socket
    jobs: deque[tuple[int, Job | None]] = field(default_factory=deque)


class WorkerPool:
    """`size` workers; use as a context manager. `modules`: imported once before several workers are forked."""

    def __init__(
        self, size: int, log: Path, modules: Sequence[str] = (), launch: Launch | None = None
    ) -> None:
        self._log = log
        self._launch = launch or Launch()
        self._forkserver: ForkServer | None = None
        self._batch = 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        with log.open("ab") as file:
            if size > 1:
                self._forkserver = ForkServer([_WORKER, *modules], file.fileno(), self._launch)
            for _ in range(size):
                self._workers.append(self._start(file.fileno()))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills and reaps every worker."""
        for worker in self._workers:
            worker.channel.close()
        if self._forkserver is not None:
            self._forkserver.close()
        else:
            for worker in self._workers:
                worker.process.kill()
                worker.process.wait()
        self._selector.close()
        self._workers = []

    def broadcast(self, values: dict[str, Any], blobs: Sequence[bytes] = (), file: int | None = None) -> None:
        """Sends every worker state for the jobs that follow, without a reply. `file`: descriptor of a file to read."""
        for worker in self._workers:
            self._send(worker, {**values, "broadcast": True}, blobs, file)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Frame]]:
        """Replies in the order they arrive. A job is drawn from `jobs` when a worker can take one.

        Closing the iterator abandons the jobs still running; their replies are dropped.

        Raises:
            UserError: a job found an error in the user's input.
            StorageFailed: a job met a disk error that may be temporary.
            WorkerDied: a worker ended.
        """
        self._batch += 1
        source = iter(jobs)
        outstanding = 0
        exhausted = False
        while True:
            while not exhausted and (worker := self._idle_worker()) is not None:
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

    def run_one(self, values: dict[str, Any], blobs: tuple[bytes, ...] = ()) -> Frame:
        """The reply to a single job."""
        ((_, reply),) = self.run([Job(None, values, blobs)])
        return reply

    def _start(self, log: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._start_process(theirs.fileno(), log)
        worker = _Worker(process, ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _start_process(self, channel: int, log: int) -> subprocess.Popen[bytes] | ForkedWorker:
        if self._forkserver is not None:
            return self._forkserver.start(_WORKER, output=log, inherit=[channel])
        return subprocess.Popen(
            self._launch.command("-m", _WORKER, str(channel)),
            pass_fds=[channel],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._launch.environment(),
        )

    def _idle_worker(self) -> _Worker | None:
        worker = min(self._workers, key=lambda each: len(each.jobs))
        return worker if len(worker.jobs) < JOBS_PER_WORKER else None

    def _replies(self) -> Iterator[tuple[int, Job, Frame]]:
        for key, _ in self._selector.select():
            worker: _Worker = key.data
            reply = self._receive(worker)
            batch, job = worker.jobs.popleft()
            assert job is not None
            if "error" in reply.values:
                if batch != self._batch:
                    continue
                if "errno" in reply.values:
                    raise StorageFailed(reply.values["error"], reply.values["errno"])
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
