"""Workers of pools in a test process, forked from one process that has imported torch: 1.5 CPU seconds less each.

Each becomes what `python -m coordinator.workers.worker` becomes, a child of the process that asked, in the sandbox if it is to be. Processes
of tests that start a whole command have none of this, nor has a test that marks itself `fresh_workers`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from coordinator.sandbox import enter
from coordinator.workers import pool
from edge_client.processes.process import worker_environment

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SUFFIX = [sys.executable, "-P", "-m", "coordinator.workers.worker"]
_SANDBOX = [sys.executable, "-I", "-S", enter.__file__]
_AT_IMPORT = {name: os.environ.get(name) for name in ("PYTHONPATH", "LD_PRELOAD")}
"""Variables that act before a worker's own code, as they are for all tests."""
_COVERAGE = any(name.startswith(("COV_CORE", "COVERAGE_PROCESS")) for name in os.environ)
_MESSAGE_BYTES = 1 << 20
_HIGH = 200
"""Descriptors from here on are never those that a worker is given by number."""

_one_at_a_time = threading.Lock()


@pytest.fixture(autouse=True)
def preloaded_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.node.get_closest_marker("fresh_workers") is None:
        monkeypatch.setattr(pool, "subprocess", SimpleNamespace(Popen=_Worker, DEVNULL=subprocess.DEVNULL))
    yield


class _Worker(subprocess.Popen[bytes]):
    """A process that is forked rather than started, where that makes no difference."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:
        cwd, env, _, _, _, stdin, _, _, stdout, _, stderr = rest[:11]
        words = list(args)
        rules = None
        if words[:4] == _SANDBOX:
            rules, words = words[4], words[5:]
        if (
            words[:4] != _SUFFIX
            or _COVERAGE
            or any(env.get(name) != value for name, value in _AT_IMPORT.items())
        ):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)  # type: ignore[misc]
            return
        request = {
            "arguments": words[4:],
            "rules": rules,
            "environment": env,
            "folder": str(cwd or Path.cwd()),
            "targets": [0, 1, 2, *pass_fds],
            "parent": os.getpid(),
        }
        with _one_at_a_time:
            self.pid = _ask(request, [stdin, stdout, stderr, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*rest[5:11])  # type: ignore[attr-defined]


def _ask(request: dict[str, Any], descriptors: list[int]) -> int:
    """The id of a new process, a child of this one."""
    control, libc = _template(), ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whose parent has ended becomes our child
    try:
        socket.send_fds(control, [json.dumps(request).encode()], descriptors)
        return int(control.recv(64))
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _template() -> socket.socket:
    """A connection to the process of which workers are forked. It ends when the connection does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    script = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    with theirs:
        subprocess.Popen(
            [sys.executable, "-P", "-c", script, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={
                **worker_environment(),
                **{name: value for name, value in _AT_IMPORT.items() if value is not None},
            },
        )
    return ours


def _serve(control: socket.socket) -> NoReturn:
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 16)
        if not message:
            os._exit(0)
        if not (between := os.fork()):
            if os.fork():
                os._exit(0)
            _become(json.loads(message), descriptors, control)
        os.waitpid(between, 0)
        for each in descriptors:
            os.close(each)


def _become(request: dict[str, Any], descriptors: list[int], control: socket.socket) -> NoReturn:
    status = 1
    try:
        while os.getppid() != request["parent"]:
            time.sleep(0.0005)
        control.send(str(os.getpid()).encode())
        control.close()
        high = [fcntl(each, F_DUPFD_CLOEXEC, _HIGH) for each in descriptors]
        for each in descriptors:
            os.close(each)
        for source, target in zip(high, request["targets"], strict=True):
            os.dup2(source, target)
            os.close(source)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv[1:] = request["arguments"]
        if request["rules"] is not None:
            enter.enter(json.loads(request["rules"]))
        from coordinator.workers import worker

        worker.main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    import importlib

    for name in ("coordinator.workers.worker", *pool.TORCH):
        importlib.import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
