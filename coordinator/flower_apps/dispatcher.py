"""Hands messages to workers and takes their replies, in a thread, so that clients work on while the ServerApp does something else.

A client has one message at a time, in the order they were sent, so that its state has one history. A worker has up to two
messages, one running and one queued, if enough are left for all. When a worker dies, its client is tried once more on a new one, and then answered with an
error.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message

from coordinator.flower_apps import wire
from coordinator.flower_apps.forks import Forked, Forks
from coordinator.flower_apps.loading import LoadFailed
from coordinator.flower_apps.outbox import Inbox
from coordinator.flower_internals import ErrorCode
from edge_client.processes.channel import Closed, Frame, receive_frame, send_frame

MESSAGES_PER_WORKER = 2
_ATTEMPTS = 2
"""Workers that a client may lose before it is answered with an error."""
_MAX_FAILURES = 1000
_LAST_WORDS_SECONDS = 1.0
"""How long the rest of a dead worker's last reply is awaited."""


@dataclass(eq=False)
class Node:
    """A client: its `node_config` and its state, as `wire.encode_records` gives it."""

    partition: int
    config: dict[str, Any]
    state: list[Any] = field(default_factory=list)
    blobs: Sequence[bytes] = ()


@dataclass(eq=False)
class Task:
    """A message on its way to a client, and then its reply."""

    message: Message
    values: dict[str, Any]
    blobs: Sequence[bytes]
    lost: int = 0
    reply: Message | None = None
    awaited: bool = False

    @property
    def node_id(self) -> int:
        node_id: int = self.message.metadata.dst_node_id
        return node_id

    @property
    def expires_at(self) -> float:
        """Unix time."""
        expires_at: float = self.message.metadata.created_at + self.message.metadata.ttl
        return expires_at


class NodeQueue:
    """Tasks in the order they came, but one per node at a time."""

    def __init__(self) -> None:
        self._tasks: dict[int, deque[Task]] = {}
        self._ready: deque[int] = deque()

    def add(self, task: Task) -> None:
        if task.node_id in self._tasks:
            self._tasks[task.node_id].append(task)
        else:
            self._tasks[task.node_id] = deque([task])
            self._ready.append(task.node_id)

    def __len__(self) -> int:
        """Tasks that `take` would give now, one after the other."""
        return len(self._ready)

    def take(self) -> Task | None:
        """The next task whose node is free; the node is busy until `finish` or `put_back`."""
        return self._tasks[self._ready.popleft()][0] if self._ready else None

    def put_back(self, task: Task) -> None:
        """Makes a task that was taken the next one."""
        self._ready.appendleft(task.node_id)

    def finish(self, task: Task) -> None:
        """Frees the node of a task that was taken."""
        tasks = self._tasks[task.node_id]
        tasks.popleft()
        if tasks:
            self._ready.append(task.node_id)
        else:
            del self._tasks[task.node_id]


@dataclass(eq=False)
class _Worker:
    process: Forked
    ended: int
    shared: wire.SharedBlobs = field(default_factory=wire.SharedBlobs)
    inbox: Inbox = field(default_factory=Inbox)
    tasks: deque[Task] = field(default_factory=deque)
    loaded: bool = False


class Dispatcher:
    """`size` workers and the clients of `nodes`.

    Attributes:
        sent, failed: messages by type; failed are those answered with an error.
        failures: the first errors, for the report.
        first_reply_at: Unix time.
    """

    def __init__(
        self, size: int, nodes: Mapping[int, Node], forks: Forks, clock: Callable[[], float]
    ) -> None:
        self.first_reply_at: float | None = None
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self._nodes = nodes
        self._forks = forks
        self._clock = clock
        self._queue = NodeQueue()
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._wake = os.eventfd(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._workers = [self._fork() for _ in range(size)]
        threading.Thread(target=self._run, daemon=True).start()

    def wait_until_loaded(self) -> None:
        """Waits until every worker has loaded the ClientApp. Raises: LoadFailed: one could not."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or all(each.loaded for each in self._workers))
            self.check()

    def check(self) -> None:
        """Raises what has ended the dispatcher, if anything."""
        if self._failure is not None:
            raise self._failure

    def submit(self, tasks: Iterable[Task]) -> None:
        """Sends messages to their clients."""
        with self._changed:
            self.check()
            for task in tasks:
                self.sent[task.message.metadata.message_type] += 1
                self._queue.add(task)
        os.eventfd_write(self._wake, 1)

    def wait(self, tasks: Sequence[Task], seconds: float | None) -> None:
        """Waits for the replies to all tasks, but no longer than `seconds`, nor for a message that has expired."""
        until = None if seconds is None else self._clock() + seconds
        with self._changed:
            for task in reversed(tasks):  # the last reply comes last, or nearly so: few are waited for
                task.awaited = True
                end = task.expires_at if until is None else min(until, task.expires_at)
                while task.reply is None and self._failure is None and (left := end - self._clock()) > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self.check()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    frames = self._assign()
                for worker, values, blobs in frames:
                    try:
                        send_frame(worker.process.channel, values, blobs)
                    except Closed:
                        continue  # its end is reported too
                for key, _ in self._selector.select():
                    if key.fileobj == self._wake:
                        os.eventfd_read(self._wake)
                    elif key.data in self._workers:
                        self._listen(key.data, ended=key.fileobj == key.data.ended)
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _assign(self) -> list[tuple[_Worker, dict[str, Any], list[bytes]]]:
        """Gives tasks to workers that can take one; returns the frames to send."""
        frames: list[tuple[_Worker, dict[str, Any], list[bytes]]] = []
        while True:
            worker = min(self._workers, key=lambda each: len(each.tasks))
            # The last ones are not queued behind a client that may take long while another worker is idle.
            limit = MESSAGES_PER_WORKER if len(self._queue) > len(self._workers) else 1
            if len(worker.tasks) >= limit or (task := self._queue.take()) is None:
                return frames
            if task.expires_at < self._clock():
                self._settle(task, Message(self.expiry(), reply_to=task.message))
                continue
            node = self._nodes[task.node_id]
            places, new = worker.shared.reduce([*task.blobs, *node.blobs])
            worker.tasks.append(task)
            context = {"node_config": node.config, "state": node.state}
            values = {"message": task.values, "in_message": len(task.blobs), "places": places, **context}
            frames.append((worker, values, new))

    def _listen(self, worker: _Worker, *, ended: bool) -> None:
        try:
            if not ended:
                self._receive(worker, worker.inbox.open(receive_frame(worker.process.channel)))
                return
            worker.process.channel.settimeout(_LAST_WORDS_SECONDS)
            while True:
                self._receive(worker, worker.inbox.open(receive_frame(worker.process.channel)))
        except Closed:
            self._replace(worker)

    def _receive(self, worker: _Worker, frame: Frame) -> None:
        if "load_failed" in frame.values:
            raise LoadFailed(frame.values["load_failed"])
        if "loaded" in frame.values:
            with self._changed:
                worker.loaded = True
                self._changed.notify_all()
            return
        task = worker.tasks[0]
        if "failed" in frame.values:
            code, reason = frame.values["failed"]
            reply = Message(Error(code, reason), reply_to=task.message)
        else:
            reply = wire.decode_message(frame.values["reply"], frame.blobs[: frame.values["in_reply"]])
        with self._changed:
            worker.tasks.popleft()
            node = self._nodes[task.node_id]
            node.config = frame.values.get("node_config", node.config)
            if "state" in frame.values:
                node.state, node.blobs = frame.values["state"], frame.blobs[frame.values["in_reply"] :]
            self._settle(task, reply)

    def _settle(self, task: Task, reply: Message) -> None:
        self._queue.finish(task)
        task.reply, task.blobs = reply, ()
        if self.first_reply_at is None:
            self.first_reply_at = self._clock()
        if reply.has_error():
            self._note_failure(task, reply.error)
        if task.awaited:
            self._changed.notify_all()

    def _note_failure(self, task: Task, error: Error) -> None:
        metadata = task.message.metadata
        self.failed[metadata.message_type] += 1
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(
                {
                    "node_id": task.node_id,
                    "partition_id": self._nodes[task.node_id].partition,
                    "message_type": metadata.message_type,
                    "group_id": metadata.group_id,
                    "code": error.code,
                    "reason": error.reason,
                }
            )

    def _replace(self, worker: _Worker) -> None:
        """Puts a new worker in the place of one that has ended."""
        self._selector.unregister(worker.process.channel)
        self._selector.unregister(worker.ended)
        worker.process.channel.close()
        os.close(worker.ended)
        how = _describe_status(self._forks.reap(worker.process.pid))
        if not worker.loaded:
            raise LoadFailed(f"tool.flwr.app.components.clientapp: the process that loads it {how}")
        new = self._fork()
        with self._changed:
            self._workers[self._workers.index(worker)] = new
            if worker.tasks:
                worker.tasks[0].lost += 1
            for task in reversed(worker.tasks):
                if task.lost == _ATTEMPTS:
                    error = Error(ErrorCode.UNKNOWN, f"the worker process of this client {how}, twice")
                    self._settle(task, Message(error, reply_to=task.message))
                else:
                    self._queue.put_back(task)

    def _fork(self) -> _Worker:
        process = self._forks.fork()
        worker = _Worker(process, os.pidfd_open(process.pid))
        self._selector.register(process.channel, selectors.EVENT_READ, worker)
        self._selector.register(worker.ended, selectors.EVENT_READ, worker)
        return worker

    @staticmethod
    def expiry() -> Error:
        """The error of a message whose time to live is over."""
        return Error(ErrorCode.MESSAGE_UNAVAILABLE, "the message expired before its reply was there")


def _describe_status(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
