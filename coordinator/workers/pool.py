"""A pool of worker processes that lives as long as the simulation.

Each worker is one single-threaded process of `coordinator.workers.worker`, connected by a socket pair. It dies with its
parent and leaves nothing behind: no shared memory and, except for the log, no files. A worker has at most two jobs, one
running and one queued, so that it never idles. Several workers are forked from one process that has imported what they
need (`edge_client.processes.process.fork_each`).

Jobs and replies are frames (`edge_client.processes.channel`).
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coordinator.errors import StorageFailed, UserError
from edge_client.processes.channel import Closed, Frame, receive_frame, send_frame
from edge_client.processes.process import Launch

JOBS_PER_WORKER = 2
"""Jobs that one worker has at a time."""
TORCH = ("models.zoo", "edge_client.train.torch_trainer")
"""Modules that workers for torch models import."""
LITERT = ("edge_client.train.litert_trainer",)
"""Modules that workers for artifacts import."""
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
    channel: socket.socket
    jobs: deque[tuple[int, Job | None]] = field(default_factory=deque)


class WorkerPool:
    """`size` workers; use as a context manager. `modules`: imported once before several workers are forked."""

    def __init__(
        self, size: int, log: Path, modules: Sequence[str] = (), launch: Launch | None = None
    ) -> None:
        self._log = log
        launch = launch or Launch()
        self._batch = 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        with ExitStack() as stack:
            theirs: list[int] = []
            for _ in range(size):
                channel, other = socket.socketpair()
                theirs.append(stack.enter_context(other).fileno())
                self._workers.append(_Worker(channel))
                self._selector.register(channel, selectors.EVENT_READ, self._workers[-1])
            file = stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                launch.command("-m", _WORKER, ",".join(map(str, theirs)), *(modules if size > 1 else ())),
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=launch.environment(),
            )

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
        if len(self._workers) > 1:
            self._process.terminate()  # it ends and reaps them
        else:
            self._process.kill()
        self._process.wait()
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
            send_frame(worker.channel, values, blobs, file)
        except Closed:
            raise self._died() from None

    def _receive(self, worker: _Worker) -> Frame:
        try:
            return receive_frame(worker.channel)
        except Closed:
            raise self._died() from None

    def _died(self) -> WorkerDied:
        status = self._process.wait()
        with self._log.open("rb") as file:  # a worker may have written without end
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()[-8:]
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return WorkerDied(f"a worker process ended with {how}; the end of {self._log}:\n" + "\n".join(tail))
