"""Workers that are forked from one process which has imported what they all need, once.

    with Nursery(["models.zoo"], log) as nursery:
        worker = nursery.start("coordinator.simulation.worker", output=log, inherit=[channel])
        worker.wait()

A worker runs as `python -P -m MODULE ARGUMENTS…` would, with the numbers of the file descriptors it inherits as its last
arguments. What was imported before the fork is in memory once, however many workers share it. User code never runs in
the nursery itself, and it forks only while it has a single thread.

The nursery dies with the thread that made it, and its workers die with the nursery, once they have called
`process.die_with_parent` as all our workers do. It reaps them, and tells how they ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from edge_client.process import PARENT_VARIABLE, Launch, die_with_parent

_MESSAGE_BYTES = 65_536
_MOST_DESCRIPTORS = 8


class Nursery:
    """The parent's side; use as a context manager, in one thread."""

    def __init__(self, modules: Sequence[str], output: int, launch: Launch | None = None) -> None:
        """Starts importing `modules`; what is printed meanwhile goes to the file descriptor `output`.

        Workers are in whatever `launch` puts their common parent into, a sandbox for instance.
        """
        launch = launch or Launch()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                launch.command("-m", "edge_client.nursery", str(theirs.fileno()), *modules),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=launch.environment(),
            )
        self._started = 0
        self._statuses: dict[int, int] = {}

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, module: str, *arguments: str, output: int, inherit: Sequence[int] = ()) -> Forked:
        """A worker; forked as soon as the imports are done, which is not waited for.

        `output`: file descriptor that becomes its standard output and error. `inherit`: further ones it gets.
        """
        number, self._started = self._started, self._started + 1
        request = {"start": number, "module": module, "arguments": arguments}
        with suppress(OSError):  # the nursery is gone; `wait` tells
            socket.send_fds(self._control, [json.dumps(request).encode()], [output, *inherit])
        return Forked(self, number)

    def kill(self, number: int) -> None:
        """Has the nursery kill a worker of its own, if it still lives."""
        with suppress(OSError):
            self._control.send(json.dumps({"kill": number}).encode())

    def status(self, number: int) -> int:
        """How a worker ended, as in `subprocess`, once it has; that of the nursery where that ended first."""
        while number not in self._statuses:
            try:
                message = self._control.recv(_MESSAGE_BYTES)
            except ConnectionError:
                message = b""
            if not message:
                return self._process.wait()
            ended = json.loads(message)
            self._statuses[ended["number"]] = ended["status"]
        return self._statuses[number]

    def close(self) -> None:
        """Ends and reaps the nursery, which ends and reaps its workers."""
        self._process.terminate()
        self._process.wait()
        self._control.close()


class Forked:
    """A worker, used like a `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, number: int) -> None:
        self._nursery, self._number = nursery, number

    def kill(self) -> None:
        self._nursery.kill(self._number)

    def wait(self) -> int:
        """Its exit status; negative: the number of the signal that ended it."""
        return self._nursery.status(self._number)


def main() -> None:
    """The nursery, and in each fork its worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; our parent decides what it means
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to pages that are shared
    with socket.socket(fileno=int(sys.argv[1])) as control:
        module, sys.argv = _Nursing(control).worker()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Nursing:
    """The nursery's side: forks, kills, reaps and tells."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()

    def worker(self) -> tuple[str, list[str]]:
        """Module and arguments of a worker. Returns in forks only; the nursery ends in here."""
        signal.signal(signal.SIGTERM, self._end)
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(key.fd, key.data)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
                if not message:
                    self._end()
                request = json.loads(message)
                if "kill" in request:
                    if request["kill"] in self._pids:
                        os.kill(self._pids[request["kill"]], signal.SIGKILL)
                elif self._forked(request["start"], descriptors):
                    return self._became(request, descriptors)

    def _forked(self, number: int, descriptors: Sequence[int]) -> bool:
        """True in the fork."""
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            raise RuntimeError("what was imported has started threads; forks would inherit what they hold")
        sys.stdout.flush()
        sys.stderr.flush()
        # What ends the nursery is for the nursery: not for a fork that is none of its own yet.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if not pid:
            return True
        self._pids[number] = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, number)
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def _became(self, request: dict[str, Any], descriptors: Sequence[int]) -> tuple[str, list[str]]:
        """The fork as if it had been started by itself."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._control:
                os.close(key.fd)
        self._selector.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output, *inherited = descriptors
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        module = request["module"]
        return module, [module, *request["arguments"], *map(str, inherited)]

    def _reap(self, descriptor: int, number: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(self._pids.pop(number), 0)
        ended = {"number": number, "status": os.waitstatus_to_exitcode(status)}
        with suppress(OSError):  # nobody listens any more
            self._control.send(json.dumps(ended).encode())

    def _end(self, number: int = 0, frame: FrameType | None = None) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        os._exit(0)


if __name__ == "__main__":
    main()
