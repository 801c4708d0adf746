"""`python -P -m models.pretrain.hosts.member`: one host's part of a training, started by `models.pretrain.hosts`.

It talks with the launcher as `models.pretrain.hosts.protocol` says, and ends, and its processes with it, when its input closes
or is silent: the launcher is gone, or cannot be reached and counts this host as lost.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from edge_client.processes import process
from models.pretrain.hosts import interfaces
from models.pretrain.hosts.protocol import ALIVE_SECONDS, LAUNCHER_SILENT_SECONDS, TOKEN
from models.pretrain.recovery.statuses import PREEMPTED, REFUSED, STOPPED

if TYPE_CHECKING:
    from models.pretrain.recovery import elastic

UNREACHABLE_SECONDS = 8.0
"""How long the rendezvous may not be reached."""

FOLDER_SECONDS = 10.0
"""How long a new file may take to appear on a shared file system."""

LAUNCHER_GONE = 74
"""Exit status (EX_IOERR)."""


def main() -> None:
    lines = _Lines(os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # the processes that it starts must not take the launcher's lines
    report = process.reporter(sys.stdout)
    hello = lines.next()
    os.environ.update(hello["environment"])
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    job = Path(hello["job"])
    if problem := _folder_problem(job.parent / TOKEN, hello["token"]) or _bind(hello["address"]):
        report(error=problem)
        raise SystemExit(REFUSED)
    commands: queue.SimpleQueue[Training | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines, commands, report), daemon=True).start()
    threading.Thread(target=_report_alive, args=(report,), daemon=True).start()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["models.pretrain.recovery.forkserver_imports"])
    forkserver.ensure_running()
    from models.pretrain.recovery import elastic, store  # they import torch

    while hello["reach"] and not _reaches(hello["reach"]):
        time.sleep(ALIVE_SECONDS)
    report(ready=True)
    while True:
        training = commands.get()
        if training is None:
            served = store.listen(hello["address"])  # until the next one
            report(endpoint=f"{hello['address']}:{served.port}")
        else:
            report(ended=training.run(partial(elastic.run, job, elastic.Fleet(**training.fleet), report)))
            if training.left:
                raise SystemExit(PREEMPTED)


class Training:
    """One training of this member, run by the main thread and ended by another.

    Attributes:
        fleet: fields of the agent's `Fleet`.
        left: this host was asked to leave, by a signal.
    """

    def __init__(self, fleet: Mapping[str, Any], report: process.Report) -> None:
        self.fleet, self.report = fleet, report
        self.left = self._asked = self._running = False
        self._agent: elastic.Agent | None = None

    def run(self, agent: Callable[[Callable[[elastic.Agent], None]], int]) -> int:
        """Runs the agent, which passes itself to the function that it is given; returns its status."""
        from torch.distributed.elastic.multiprocessing import SignalException

        def on_signal(number: int, frame: FrameType | None) -> NoReturn:
            raise SignalException("stopped", signal.Signals(number))

        over = threading.Event()
        threading.Thread(target=_watch, args=(self.fleet["endpoint"], self.report, over), daemon=True).start()
        status = STOPPED
        try:
            signal.signal(signal.SIGTERM, on_signal)  # torch's agent sets its own later
            self._running = True
            if not self._asked:
                status = agent(self._started)
        except SignalException:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come late, and there is nothing to save
            over.set()
        self.left = status in (PREEMPTED, STOPPED) and not self._asked
        return status

    def stop(self) -> None:
        """Has the processes save their work and end."""
        self._asked = True
        if self._running:
            os.kill(os.getpid(), signal.SIGTERM)

    def abort(self) -> None:
        """Kills the processes."""
        if self._agent is not None:
            self._agent.kill()
        self.stop()

    def _started(self, agent: elastic.Agent) -> None:
        self._agent = agent


class _Lines:
    """JSON lines from a file descriptor, with a limit for the silence between two."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._buffer = descriptor, b""

    def next(self) -> dict[str, Any]:
        """The next line; ends this process when there will be none."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._descriptor], [], [], LAUNCHER_SILENT_SECONDS)
            received = os.read(self._descriptor, 65536) if ready else b""
            if not received:
                _leave()
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        document: dict[str, Any] = json.loads(line)
        return document


def _leave() -> NoReturn:
    """Ends this process, and with it by the kernel all that it started."""
    os._exit(LAUNCHER_GONE)


def _listen(lines: _Lines, commands: queue.SimpleQueue[Training | None], report: process.Report) -> None:
    training = None
    try:
        while True:
            line = lines.next()
            if "serve" in line:
                commands.put(None)
            elif "start" in line:
                training = Training(line["start"], report)
                commands.put(training)
            elif training is not None and "stop" in line:
                training.stop()
            elif training is not None and "abort" in line:
                training.abort()
    finally:
        _leave()


def _report_alive(report: process.Report) -> None:
    with suppress(OSError):
        while True:
            report(alive=True)
            time.sleep(ALIVE_SECONDS)
    _leave()


def _watch(endpoint: str, report: process.Report, over: threading.Event) -> None:
    """Reports once when the rendezvous cannot be reached, until the training is over."""
    last = time.monotonic()
    while time.monotonic() - last < UNREACHABLE_SECONDS:
        if over.wait(ALIVE_SECONDS):
            return
        if _reaches(endpoint):
            last = time.monotonic()
    report(unreachable=endpoint)


def _reaches(endpoint: str) -> bool:
    """Whether something listens there."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _folder_problem(path: Path, token: str) -> str:
    """What is wrong with the run's folder on this host; empty if nothing."""
    end = time.monotonic() + FOLDER_SECONDS
    found = _read(path)
    while found != token and time.monotonic() < end:
        time.sleep(0.2)
        found = _read(path)
    if found == token:
        return ""
    what = "is not there" if found is None else "holds something else"
    return f"{path} {what} on this host: all hosts must see the folder {path.parent} on a shared file system, under this path"


def _read(path: Path) -> str | None:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return None


def _bind(address: str) -> str:
    """Has gloo and NCCL use the interface of `address`; what is wrong with it, or nothing."""
    name = interfaces.of(address)
    if name is None:
        return f"no network interface here has the address {address}; give the host's own in the hosts file: address=IP"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)
    return ""


if __name__ == "__main__":
    main()
