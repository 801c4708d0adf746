"""Pretrainings started as `coordinator.datacenter.jobs` starts them, to be killed: a small job, its agents, and their processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.processes.process import worker_environment
from models.pretrain.recovery.curve import Curve

LENGTH, VOCAB = 16, 51
PATIENCE_SECONDS = 600.0


def write_job(folder: Path, steps: int, *, every: int = 5, plan: Mapping[str, Any] | None = None) -> Path:
    """A causal transformer on sequences that count up; 11 rows a batch, which few degrees divide."""
    rng = np.random.default_rng(3)
    ids = (rng.integers(VOCAB, size=(44, 1)) + np.arange(LENGTH + 1)) % VOCAB
    (folder / "arrays").mkdir(parents=True)
    for part in ("train", "test"):
        np.save(folder / "arrays" / f"x_{part}.npy", ids[:, :-1].astype(np.int32))
        np.save(folder / "arrays" / f"y_{part}.npy", ids[:, 1:].astype(np.int32))
    settings = {
        "model": {
            "name": "gpt",
            "input_shape": [LENGTH],
            "classes": VOCAB,
            "input_dtype": "int32",
            "task": "next_token",
            "options": {"width": 32, "layers": 2, "heads": 4},
        },
        "arrays": "arrays",
        "seed": 3,
        "options": {"steps": steps, "batch_size": 11, "lr": 3e-3, "eps": 1e-6},
        "checkpoint": {"every": every},
        "plan": dict(plan or {}),
    }
    path = folder / "job.json"
    path.write_text(json.dumps(settings))
    return path


def change(job: Path, **keys: Any) -> None:
    job.write_text(json.dumps(json.loads(job.read_text()) | keys))


class Agent:
    """`models.pretrain.launch`, and what its processes say.

    Attributes:
        lines: JSON objects of standard output.
    """

    def __init__(self, job: Path, ranks: int, *arguments: str, module: str = "launch") -> None:
        command = [sys.executable, "-P", "-m", f"models.pretrain.{module}"]
        given = [str(ranks), str(job), *arguments] if module == "launch" else [str(job)]
        self._start(command + given, job.parent / "log.txt")

    def _start(self, command: list[str], log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=worker_environment(), text=True
            )
        self.lines: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError), self._news:
                self.lines.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def waits_for(self, condition: Callable[[dict[str, Any]], bool], after: int = 0) -> dict[str, Any]:
        """The first line, from number `after` on, that fulfils `condition`."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines[after:] if condition(line)]

        with self._news:
            result = self._news.wait_for(
                lambda: found() or not self._reader.is_alive(), timeout=PATIENCE_SECONDS
            )
            assert result and found(), self.lines[-3:]
            return found()[0]

    def reaches(self, step: int, after: int = 0) -> dict[str, Any]:
        return self.waits_for(lambda line: "loss" in line and line["step"] >= step, after)

    @property
    def workers(self) -> list[int]:
        """Ids of the processes that train: children of the server that the agent forks them from."""
        return [worker for child in children(self.process.pid) for worker in children(child)]

    def ended(self) -> int:
        status = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return status


def children(process: int) -> list[int]:
    """Of any thread of `process`."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def is_alive(process: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@contextmanager
def training(job: Path, ranks: int, *arguments: str) -> Iterator[Agent]:
    """An agent that is killed on the way out."""
    agent = Agent(job, ranks, *arguments)
    try:
        yield agent
    finally:
        agent.process.kill()
        agent.process.wait()


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true while there is patience."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def kill(process: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(process, number)


def curve_of(job: Path) -> list[dict[str, Any]]:
    """Every step once, in order, or it is no curve."""
    points = list(Curve(job.parent / "curve.jsonl").points())
    assert [point["step"] for point in points] == list(range(1, len(points) + 1))
    return points
