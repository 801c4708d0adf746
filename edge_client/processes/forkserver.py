"""A fork server: workers are forked from one process that has imported their modules once.

    with ForkServer(["models.zoo"], log) as server:
        worker = server.start("coordinator.workers.worker", output=log, inherit=[channel])
        worker.wait()

A worker runs as `python -P -m MODULE ARGUMENTS…` would, with the numbers of the file descriptors it inherits as its last
arguments. Modules imported before the fork are in memory once for all workers. User code never runs in the server
itself, and it forks only while it has a single thread.

The server dies with the thread that created it, and its workers die with the server, once they have called
`process.die_with_parent` as all our workers do. The server reaps them and reports their exit statuses.
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

from edge_client.processes.process import PARENT_VARIABLE, Launch, die_with_parent

_MESSAGE_BYTES = 65_536
_MOST_DESCRIPTORS = 8


class ForkServer:
    """The parent's side; use as a context manager, in one thread."""

    def __init__(self, modules: Sequence[str], output: int, launch: Launch | None = None) -> None:
        """Starts importing `modules`; its output goes to the file descriptor `output`.

        Workers inherit the environment that `launch` starts their common parent in, such as a sandbox.
        """
        launch = launch or Launch()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                launch.command("-m", "edge_client.processes.forkserver", str(theirs.fileno()), *modules),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=launch.environment(),
            )
        self._started = 0
        self._statuses: dict[int, int] = {}

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, module: str, *arguments: str, output: int, inherit: Sequence[int] = ()) -> ForkedWorker:
        """Starts a worker, which is forked once the imports are done; does not wait for that.

        `output`: file descriptor for its standard output and error. `inherit`: further descriptors for it.
        """
        number, self._started = self._started, self._started + 1
        request = {"start": number, "module": module, "arguments": arguments}
        with suppress(OSError):  # the server has ended; `wait` reports it
            socket.send_fds(self._control, [json.dumps(request).encode()], [output, *inherit])
        return ForkedWorker(self, number)

    def kill(self, number: int) -> None:
        """Has the server kill a worker, if it is alive."""
        with suppress(OSError):
            self._control.send(json.dumps({"kill": number}).encode())

    def status(self, number: int) -> int:
        """Waits for a worker's exit status, as in `subprocess`; the server's if that ended first."""
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
        """Ends and reaps the server, which ends and reaps its workers."""
        self._process.terminate()
        self._process.wait()
        self._control.close()


class ForkedWorker:
    """A worker, used like a `subprocess.Popen`."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self._number = server, number

    def kill(self) -> None:
        self._server.kill(self._number)

    def wait(self) -> int:
        """The exit status; negative: the number of the signal that ended it."""
        return self._server.status(self._number)


def main() -> None:
    """Runs the server, and in each fork its worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; our parent decides what it means
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to pages that are shared
    with socket.socket(fileno=int(sys.argv[1])) as control:
        module, sys.argv = _Server(control).worker()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Server:
    """The server's side: forks, kills, reaps and reports."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()

    def worker(self) -> tuple[str, list[str]]:
        """Module and arguments of a worker. Returns only in forks; the server never returns from here."""
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
                elif self._fork(request["start"], descriptors):
                    return self._become_worker(request, descriptors)

    def _fork(self, number: int, descriptors: Sequence[int]) -> bool:
        """Forks; True in the fork."""
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            raise RuntimeError(
                "an imported module has started threads; forks would inherit the locks they hold"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        # SIGTERM ends the server: a fork must not receive it before it has its own handlers.
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

    def _become_worker(self, request: dict[str, Any], descriptors: Sequence[int]) -> tuple[str, list[str]]:
        """Turns the fork into a process as if started separately."""
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
        with suppress(OSError):  # the parent has ended
            self._control.send(json.dumps(ended).encode())

    def _end(self, number: int = 0, frame: FrameType | None = None) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        os._exit(0)


if __name__ == "__main__":
    main()
