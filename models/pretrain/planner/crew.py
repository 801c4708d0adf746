"""Processes of this host that measure for the planner: started once, asked several times, gone with us.

They compute what `models.pretrain.planner.ranks` knows to answer. A request is one line of JSON to every one of them, the
answer one line of the first. As all plans take turns in the same processes, a busy machine slows all of them alike.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch._C._distributed_c10d import TCPStore

from edge_client import process
from models.job import Job, JobError

MOST = 16
"""Processes that are started, of however many there will be."""
LOOKS_SECONDS = 0.5
"""How often a dead process is looked for while others compute."""


@dataclass(frozen=True)
class Crew:
    """Processes that wait for requests; `count` of them."""

    job: Job
    started: list[subprocess.Popen[str]]
    log: IO[str]

    @property
    def count(self) -> int:
        return len(self.started)

    def ask(self, what: str, **given: Any) -> dict[str, Any]:
        """What they found.

        Raises:
            JobError: one of them failed; its last words are in the message.
        """
        line = json.dumps({"what": what, **given}) + "\n"
        for each in self.started:
            assert each.stdin is not None
            try:
                each.stdin.write(line)
                each.stdin.flush()
            except BrokenPipeError:
                self._fail()
        answers = self.started[0].stdout
        assert answers is not None
        while not select.select([answers], [], [], LOOKS_SECONDS)[0]:
            if any(each.poll() is not None for each in self.started):
                self._fail()
        answer = answers.readline()
        if not answer:
            self._fail()
        found: dict[str, Any] = json.loads(answer)
        return found

    def _fail(self) -> None:
        self.log.seek(0)
        last = [line for line in self.log.read().splitlines() if line.strip()][-1:] or ["it said nothing"]
        raise JobError(f"{self.job.path}: a measuring process failed: {last[0].strip()}")


@contextmanager
def hired(job: Job, count: int) -> Iterator[Crew]:
    """`count` processes for the length of a `with`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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
        started = []
        for rank in range(count):
            each = subprocess.Popen(
                [sys.executable, "-P", "-m", "models.pretrain.planner.ranks", str(job.path)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else log,
                stderr=log,
                text=True,
            )
            stack.callback(each.wait)
            stack.callback(each.kill)
            started.append(each)
        yield Crew(job, started, log)


def most(per_host: int) -> int:
    """How many this host can have of a host's `per_host`: as many as it has GPUs, where it has any."""
    count = min(per_host, MOST)
    return min(count, torch.cuda.device_count()) if torch.cuda.is_available() else count
