"""`python -P -m models.pretrain.server JOB.json`: all workers and servers of a job on this machine, dying together.

The job is done when worker 0 is. A server that dies is no matter while another replica of its shard lives, nor, with
mode k-of-n, a worker other than the first while enough are left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_client import process
from models import job as jobs
from models.pretrain.server import check
from models.pretrain.server.settings import Servers

Processes = dict[int, subprocess.Popen[bytes]]
"""By rank."""


class ProcessDied(ValueError):
    """One that the training cannot do without."""


def main() -> None:
    process.die_with_parent()
    report = process.reporter(sys.stdout)
    if len(sys.argv) != 2:
        report(error=f"expected one argument, the job file, got {len(sys.argv) - 1}")
        raise SystemExit(2)
    try:
        servers = check.of(jobs.read(Path(sys.argv[1])))
        with running(servers, sys.argv[1]) as processes:
            watch(servers, processes)
    except (jobs.JobError, ProcessDied) as error:
        report(error=str(error))
        raise SystemExit(1) from None


@contextmanager
def running(servers: Servers, job: str) -> Iterator[Processes]:
    """Starts all; whoever is left at the end is killed. They write their own progress to our standard output."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**process.worker_environment(), "FEDLOOP_RENDEZVOUS": f"file://{folder}/store"}
        command = [sys.executable, "-P", "-m", "models.pretrain.server.role", job]
        processes = {
            rank: subprocess.Popen(command, env={**environment, "RANK": str(rank)})
            for rank in range(servers.processes)
        }
        try:
            yield processes
        finally:
            for one in processes.values():
                one.kill()
                one.wait()


def watch(servers: Servers, processes: Processes) -> None:
    """Returns when worker 0 has ended well.

    Raises:
        ProcessDied: the training cannot go on.
    """
    lost: set[int] = set()
    left = dict(processes)
    while True:
        rank = _next_to_end(left)
        status = left.pop(rank).returncode
        if status == 0:
            if rank == 0:
                return
            continue
        lost.add(rank)
        if not bearable(servers, lost):
            raise ProcessDied(f"{servers.name(rank)} ended with status {status}")


def bearable(servers: Servers, lost: set[int]) -> bool:
    """Whether the training can end without the processes of these ranks."""
    workers = [rank for rank in lost if rank < servers.workers]
    if 0 in lost or (workers and servers.mode != "k-of-n"):
        return False
    if servers.workers - len(workers) < servers.needed:
        return False
    places = [servers.place(rank)[0] for rank in lost if rank >= servers.workers]
    return all(places.count(shard) < servers.replicas for shard in places)


def _next_to_end(processes: Processes) -> int:
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert ended is not None  # only without waiting
    for rank, one in processes.items():
        if one.pid == ended.si_pid:
            one.wait()
            return rank
    raise AssertionError(f"process {ended.si_pid} is none of ours")


if __name__ == "__main__":
    main()
