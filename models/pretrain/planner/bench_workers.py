"""Bench workers: processes of this host that measure for the planner, started once and asked several times.

They run `models.pretrain.planner.bench_rank`. A request is one line of JSON to every one of them, the answer one line of
the first. All plans take turns in the same processes, so a busy machine slows all of them alike.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch

from edge_client.processes import process
from models.job import JobError, JobFile
from models.pretrain.plan import parse
from models.pretrain.recovery.store import listen

MAX_WORKERS = 16
"""Processes that are started, at most."""
POLL_SECONDS = 0.5
"""How often to check for dead processes while waiting for an answer."""


@dataclass(frozen=True)
class BenchWorkers:
    """Processes that wait for requests."""

    job: JobFile
    processes: list[subprocess.Popen[str]]
    log: IO[str]

    @property
    def count(self) -> int:
        return len(self.processes)

    def request(self, what: str, **parameters: Any) -> dict[str, Any]:
        """Sends a request to all processes and returns the answer.

        Raises:
            JobError: one of them failed; the message has the last line of its log.
        """
        line = json.dumps({"what": what, **parameters}) + "\n"
        for worker in self.processes:
            assert worker.stdin is not None
            try:
                worker.stdin.write(line)
                worker.stdin.flush()
            except BrokenPipeError:
                self._fail()
        answers = self.processes[0].stdout
        assert answers is not None
        while not select.select([answers], [], [], POLL_SECONDS)[0]:
            if any(worker.poll() is not None for worker in self.processes):
                self._fail()
        content = answers.readline()
        if not content:
            self._fail()
        answer: dict[str, Any] = json.loads(content)
        return answer

    def steps(self, plans: Iterable[str], **parameters: Any) -> dict[str, list[list[float]]]:
        """(seconds, processor seconds) of every step of each plan; those for as many processes take turns.

        Raises:
            JobError: as `request`.
        """
        by_size: dict[int, list[str]] = defaultdict(list)
        for text in plans:
            by_size[parse(text).processes].append(text)
        measured: dict[str, list[list[float]]] = {}
        for size, alike in sorted(by_size.items()):
            measured |= self.request("steps", processes=size, plans=alike, **parameters)
        return measured

    def _fail(self) -> None:
        self.log.seek(0)
        last = [line for line in self.log.read().splitlines() if line.strip()][-1:] or ["it wrote no error"]
        raise JobError(f"{self.job.path}: a measuring process failed: {last[0].strip()}")


@contextmanager
def start(job: JobFile, count: int) -> Iterator[BenchWorkers]:
    """Starts `count` processes for the length of a `with`."""
    store = listen("127.0.0.1")
    environment = {
        **process.worker_environment(),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = []
        for rank in range(count):
            worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "models.pretrain.planner.bench_rank", str(job.path)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else log,
                stderr=log,
                text=True,
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            processes.append(worker)
        yield BenchWorkers(job, processes, log)


def max_workers(per_host: int) -> int:
    """How many of a host's `per_host` processes this host can run: at most its number of GPUs, if it has any."""
    count = min(per_host, MAX_WORKERS)
    return min(count, torch.cuda.device_count()) if torch.cuda.is_available() else count
