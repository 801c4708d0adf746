"""A pool of worker processes that lives as long as the simulation.

Each worker is one single-threaded process of `coordinator.workers.worker`, connected by a socket pair. It dies with its
parent and leaves nothing behind: shared memory is anonymous, and except for the log there are no files. A worker has at most two
jobs, one running and one queued, so that it never idles. Several workers are forked from one process that has imported what
they need (`edge_client.processes.process.serve_forks`).

A worker that dies is replaced: the new one hears the last broadcast of each kind, and its jobs are done again. A job that has
ended `ATTEMPTS` workers is given up.

Jobs and replies are frames (`edge_client.processes.channel`).
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coordinator.errors import StorageFailed, UserError
from coordinator.workers import shared_params
from coordinator.workers.shared_params import Published
from edge_client.processes.channel import Closed, Encoded, Frame, FrameReader, encode_frame, send_frames
from edge_client.processes.process import FORK, FORKED, Launch
from edge_client.wire import arrays
from strategies.params import Tensors

JOBS_PER_WORKER = 2
"""Jobs that one worker has at a time."""
ATTEMPTS = 3
"""Workers that one job may end before it is given up."""
TORCH = ("models.zoo", "edge_client.train.torch_trainer")
"""Modules that workers for torch models import."""
LITERT = ("edge_client.train.litert_trainer",)
"""Modules that workers for artifacts import."""
DIED = "died"
"""Key of a reply that stands for a job that was given up: how its last worker ended."""
_WORKER = "coordinator.workers.worker"
_TAIL_BYTES = 65_536


class WorkerDied(Exception):
    """A worker process ended unexpectedly; the message holds the end of its log."""


@dataclass(frozen=True)
class PoolJob:
    """Work for one worker, whichever is idle. The caller recognises the reply by `key`.

    `may_die`: if the job is given up, its reply has the key `DIED`; else the pool raises `WorkerDied`.
    """

    key: Any
    values: dict[str, Any]
    blobs: tuple[bytes, ...] = ()
    may_die: bool = False


@dataclass(eq=False)
class _Sent:
    """A job on its way. `attempts`: workers that have ended while they ran it."""

    batch: int
    job: PoolJob
    attempts: int = 0


@dataclass(eq=False)
class _Worker:
    """`core`: that it runs on; None: any. `id`: of its process; None while the fork is not confirmed, or if there is only one worker.
    `untold`: broadcasts that it gets with its next job, by key."""

    channel: socket.socket
    reader: FrameReader
    core: int | None
    id: int | None = None
    jobs: deque[_Sent] = field(default_factory=deque)
    untold: dict[str, Encoded] = field(default_factory=dict)


class WorkerPool:
    """`size` workers; use as a context manager. `modules`: imported once before several workers are forked.

    Attributes:
        pause: called whenever the workers have their jobs, before it waits for replies.
    """

    def __init__(
        self, size: int, log: Path, modules: Sequence[str] = (), launch: Launch | None = None
    ) -> None:
        self._size = size
        self._log = log
        self._modules = modules
        self._launch = launch or Launch()
        self.pause: Callable[[], None] = lambda: None
        self._batch = 0
        self._broadcasts: dict[str, Encoded] = {}
        self._published: Published | None = None
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._again: deque[_Sent] = deque()
        self._start()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills and reaps every worker."""
        self._stop()
        self._selector.close()
        for broadcast in self._broadcasts.values():
            if broadcast.file is not None:
                os.close(broadcast.file)
        self._broadcasts = {}

    def broadcast(
        self,
        values: dict[str, Any],
        blobs: Sequence[bytes] = (),
        file: int | None = None,
        *,
        key: str | None = None,
    ) -> None:
        """Gives every worker state for the jobs that follow, without a reply; a worker that is started later gets it too.

        `file`: descriptor of a file to read. `key`: it replaces what was sent with this key; by default the `kind`.
        """
        key = key or values["kind"]
        self.forget(key)
        kept = encode_frame({**values, "broadcast": True}, blobs, None if file is None else os.dup(file))
        self._broadcasts[key] = kept
        for worker in self._workers:
            worker.untold[key] = kept

    def forget(self, key: str) -> None:
        """Workers that get no job before do not get what was broadcast with this key."""
        before = self._broadcasts.pop(key, None)
        for worker in self._workers:
            worker.untold.pop(key, None)
        if before is not None and before.file is not None:
            os.close(before.file)

    def publish(self, params: Tensors) -> Published:
        """Gives every worker these params, from which it trains and which it scores. They are sent once, however often this is called."""
        if self._published is not None and self._published.params is params:
            return self._published
        if shared_params.are_small(params):
            encoded = arrays.encode(params)
            self._published = Published(params, arrays.sha256(encoded), len(encoded))
            self.broadcast({"kind": "params"}, [encoded])
        else:
            descriptor, self._published = shared_params.write(params)
            try:
                self.broadcast({"kind": "params", "is_mapped": True}, file=descriptor)
            finally:
                os.close(descriptor)
        return self._published

    def publish_file(self, path: Path) -> None:
        """As `publish`, of encoded params in a file, which this process need not read."""
        self._published = None
        with path.open("rb") as file:
            self.broadcast({"kind": "params", "is_mapped": False}, file=file.fileno())

    def run(self, jobs: Iterable[PoolJob]) -> Iterator[tuple[PoolJob, Frame]]:
        """Replies in the order they arrive. A job is drawn from `jobs` when a worker can take one.

        Closing the iterator abandons the jobs still running; their replies are dropped.

        Raises:
            UserError: a job found an error in the user's input.
            StorageFailed: a job met a disk error that may be temporary.
            WorkerDied: a job was given up, or workers cannot be started.
        """
        if not self._workers:
            self._start()  # the last attempt has failed
        self._batch += 1
        self._again.clear()
        source = iter(jobs)
        outstanding = 0
        exhausted = False
        while True:
            while (worker := self._idle_worker()) is not None:
                if self._again:
                    sent = self._again.popleft()
                elif exhausted or (job := next(source, None)) is None:
                    exhausted = True
                    break
                else:
                    sent = _Sent(self._batch, job)
                    outstanding += 1
                worker.jobs.append(sent)
                self._send(worker, sent.job)
            if exhausted and not outstanding:
                return
            self.pause()
            for batch, done, reply in self._replies():
                if batch == self._batch:
                    outstanding -= 1
                    yield done, reply

    def run_one(self, values: dict[str, Any], blobs: tuple[bytes, ...] = ()) -> Frame:
        """The reply to a single job."""
        ((_, reply),) = self.run([PoolJob(None, values, blobs)])
        return reply

    def _idle_worker(self) -> _Worker | None:
        worker = min(self._workers, key=lambda each: len(each.jobs))
        return worker if len(worker.jobs) < JOBS_PER_WORKER else None

    def _replies(self) -> Iterator[tuple[int, PoolJob, Frame]]:
        answering = [each for each in self._workers if each.reader.has_frame]
        for worker in answering or [key.data for key, _ in self._selector.select()]:
            if worker not in self._workers:
                continue  # replaced meanwhile
            try:
                reply = worker.reader.read()
            except Closed:
                yield from self._recover(worker)
                continue
            self._has_answered = True
            sent = worker.jobs.popleft()
            if "error" in reply.values:
                if sent.batch != self._batch:
                    continue
                if "errno" in reply.values:
                    raise StorageFailed(reply.values["error"], reply.values["errno"])
                raise UserError(reply.values["error"])
            yield sent.batch, sent.job, reply

    # How workers start, and what happens if they end

    def _start(self) -> None:
        """Starts all workers."""
        self._has_answered = False
        several = self._size > 1
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as file:
            how = ("--fork", str(theirs.fileno()), *self._modules) if several else (str(theirs.fileno()),)
            self._process = subprocess.Popen(
                self._launch.command("-m", _WORKER, *how),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._launch.environment(),
            )
        self._control = ours if several else None
        for core in _cores(self._size):
            self._add(self._ask_for_worker(0) if several else ours, core)

    def _ask_for_worker(self, ended: int) -> socket.socket:
        """The channel of a worker to be forked. `ended`: id of the worker that it replaces, or 0."""
        assert self._control is not None
        channel, other = socket.socketpair()
        with other, suppress(OSError):  # the process is gone: the channel is closed, which is noticed soon
            socket.send_fds(self._control, [FORK.pack(ended)], [other.fileno()])
        return channel

    def _add(self, channel: socket.socket, core: int | None) -> _Worker:
        worker = _Worker(channel, FrameReader(channel), core)
        self._workers.append(worker)
        self._selector.register(channel, selectors.EVENT_READ, worker)
        scheduling = encode_frame({"kind": "schedule", "core": core, "broadcast": True})
        worker.untold = {"schedule": scheduling, **self._broadcasts}
        return worker

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.channel.close()

    def _stop(self) -> None:
        """Ends and reaps all workers."""
        for worker in list(self._workers):
            self._remove(worker)
        if self._control is not None:
            self._control.close()
            self._process.terminate()  # only while it imports modules; later it ends because the socket is closed
        else:
            self._process.kill()
        self._process.wait()

    def _recover(self, worker: _Worker) -> Iterator[tuple[int, PoolJob, Frame]]:
        """Replaces a worker that has ended, or all of them if the process is gone that forks them.

        Their jobs are done again; yields those that are given up.
        """
        status = self._replace(worker)
        lost = [worker]
        if status is None:
            lost = list(self._workers)
            status = self._restart()
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        for each in lost:
            if each.jobs:
                each.jobs[0].attempts += 1
            self._again.extend(sent for sent in each.jobs if sent.batch == self._batch)
        for sent in [each for each in self._again if each.attempts >= ATTEMPTS]:
            if not sent.job.may_die:
                raise self._died(how)
            self._again.remove(sent)
            yield sent.batch, sent.job, Frame({DIED: how})

    def _replace(self, worker: _Worker) -> int | None:
        """The exit status of a worker, once another has taken its place; None if no other can be forked."""
        if self._control is None:
            return None
        try:
            self._confirm()
            assert worker.id is not None
            channel = self._ask_for_worker(worker.id)
            status, number = self._confirmation()
        except Closed:
            return None
        self._remove(worker)
        self._add(channel, worker.core).id = number
        return status

    def _confirm(self) -> None:
        """Learns the ids of workers that were forked at the start."""
        for each in self._workers:
            if each.id is None:
                _, each.id = self._confirmation()

    def _confirmation(self) -> tuple[int, int]:
        """The answer to the oldest unanswered request: exit status of the worker that has ended, id of the new one."""
        assert self._control is not None
        answer = b""
        while len(answer) < FORKED.size:
            try:
                received = self._control.recv(FORKED.size - len(answer))
            except OSError as error:
                raise Closed(str(error)) from None
            if not received:
                raise Closed("end of stream")
            answer += received
        status, number = FORKED.unpack(answer)
        return status, number

    def _restart(self) -> int:
        """The exit status of the process that was started, once another has taken its place.

        Raises:
            WorkerDied: it ended by itself before it did anything, so that another would do the same.
        """
        for worker in list(self._workers):
            self._remove(worker)
        status = self._process.wait()
        if status >= 0 and not self._has_answered:
            raise self._died(f"exit code {status}")
        if self._control is not None:
            self._control.close()
        self._start()
        return status

    def _send(self, worker: _Worker, job: PoolJob) -> None:
        frames = [*worker.untold.values(), encode_frame(job.values, job.blobs)]
        worker.untold = {}
        with suppress(Closed):  # the worker has ended, which `_replies` notices
            send_frames(worker.channel, frames)

    def _died(self, how: str) -> WorkerDied:
        with self._log.open("rb") as file:  # a worker may have written without end
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()[-8:]
        return WorkerDied(f"a worker process ended with {how}; the end of {self._log}:\n" + "\n".join(tail))


def _cores(workers: int) -> Sequence[int | None]:
    """The core of each worker. With one for every core each stays on its own: of workers that wake at the same moment the system often
    puts two on one core, where the second waits for the first."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if workers == len(cores) else [None] * workers
