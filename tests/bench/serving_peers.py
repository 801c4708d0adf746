"""Other servers of inference as processes, with the same model as ours: LitServe and Ray Serve from `.venv-peers`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

from edge_client.processes.process import tie_to_parent
from tests.support.serving import tree

_ENVIRONMENT = Path(".venv-peers")
_START_SECONDS = 120.0

BATCHES: Mapping[str, tuple[int, float]] = {"litserve": (32, 0.01), "ray": (32, 0.02)}
"""The largest batch and the seconds that it waits for rows: of the few that were tried with `mlp` and 32 connections (LitServe 16 to 64
rows, Ray 32) those with the most requests per CPU-second."""


@dataclass(frozen=True)
class Peer:
    """A server that answers `POST /predict`. `pid`: of the process above all others of it."""

    pid: int
    port: int


@contextmanager
def peer(
    name: str, model: str, options: Mapping[str, Any], log: Path, example: bytes, workers: int = 1
) -> Iterator[Peer]:
    """The server `name` (litserve, ray) with one model of the zoo. `example`: the body of a request, asked until it is answered.

    Raises:
        AssertionError: it cannot be started.
    """
    python = _ENVIRONMENT / "bin" / "python"
    assert python.exists(), f"{_ENVIRONMENT} is missing: make peers"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rows, seconds = BATCHES[name]
    command = [
        *(str(python.absolute()), "-m", f"tests.bench.serving_{name}"),
        *(str(port), model, json.dumps(options), str(rows), str(seconds), str(workers)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as file:
        process = subprocess.Popen(tie_to_parent(command), stdout=file, stderr=file, env=environment)
    try:
        _wait(process, port, example, log)
        yield Peer(process.pid, port)
    finally:
        for pid in reversed(tree(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, example: bytes, log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError, urllib3.exceptions.HTTPError):
            answer = urllib3.request("POST", f"http://127.0.0.1:{port}/predict", body=example, retries=False)
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"it does not answer:\n{log.read_text()[-3000:]}")
