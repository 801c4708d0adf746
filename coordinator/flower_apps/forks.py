"""Forks the workers of an app: one process imports flwr and torch once, and forks on request.

It stays single-threaded and loads nothing of the app, so that it can fork at any time, also to replace a worker that died. The
process that asks, which runs the ServerApp, is forked from it too.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from edge_client.processes.channel import Closed, receive_frame, send_frame
from edge_client.processes.process import die_with_parent, prepare_to_fork


@dataclass(frozen=True)
class Forked:
    """A process that was forked on request. `channel`: our end of its socket pair."""

    pid: int
    channel: socket.socket


class Forks:
    """The requesting side."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    def fork(self) -> Forked:
        """A new worker."""
        ours, theirs = socket.socketpair()
        with theirs:
            send_frame(self._requests, {"fork": True}, file=theirs.fileno())
            return Forked(receive_frame(self._requests).values["pid"], ours)

    def reap(self, pid: int) -> int:
        """How a worker has ended: its exit status, or the number of its signal, negated."""
        send_frame(self._requests, {"reap": pid})
        status: int = receive_frame(self._requests).values["status"]
        return status


def fork_all(first: Callable[[Forks], None], each: Callable[[socket.socket], None]) -> int:
    """Forks a process that runs `first`, and one that runs `each` whenever that asks; returns the status of the first.

    When the first has ended, or this process gets SIGTERM, all others are killed and reaped. If this process is killed, so are they.

    Raises:
        RuntimeError: an imported module has started a thread.
    """
    prepare_to_fork()
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ServerApp's process
    ours, theirs = socket.socketpair()
    children: set[int] = set()
    try:
        server = _fork(lambda: first(Forks(theirs)), [ours], children)
        theirs.close()
        _answer(ours, server, each, children)
        children.discard(server)
        return os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _answer(
    requests: socket.socket, server: int, each: Callable[[socket.socket], None], children: set[int]
) -> None:
    """Answers requests until the process `server` has ended."""
    ended = os.pidfd_open(server)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(requests, select.POLLIN)
    # Not until the end of the stream: a process that the app has started may hold the other end open.
    while ended not in (ready := dict(poll.poll())):
        assert requests.fileno() in ready
        try:
            frame = receive_frame(requests)
        except Closed:
            break
        if (pid := frame.values.get("reap")) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            children.discard(pid)
            send_frame(requests, {"status": status})
            continue
        assert frame.file is not None
        with socket.socket(fileno=frame.file) as channel:
            child = _fork(lambda channel=channel: each(channel), [requests], children)  # type: ignore[misc]
        send_frame(requests, {"pid": child})
    os.close(ended)


def _fork(run: Callable[[], None], close: list[socket.socket], children: set[int]) -> int:
    """Forks a child that closes what it has no business with, runs, and exits. It is added to `children`."""
    if child := os.fork():
        children.add(child)
        return child
    children.clear()  # they are not the child's to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    for each in close:
        each.close()
    run()
    raise SystemExit


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
