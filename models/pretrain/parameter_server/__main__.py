"""`python -P -m models.pretrain.parameter_server JOB.json`: all workers and servers of a job on this machine.

The job is done when worker 0 is. The training survives the death of a server while another replica of its shard lives
and, with mode k-of-n, of any worker but the first while enough are left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_client.processes import process
from models import job as jobs
from models.pretrain.parameter_server import check
from models.pretrain.parameter_server.settings import Servers

Processes = dict[int, subprocess.Popen[bytes]]
"""Processes by rank."""


class ProcessDied(ValueError):
    """The training cannot continue without this process."""


def main() -> None:
    process.die_with_parent()
    report = process.reporter(sys.stdout)
    if len(sys.argv) != 2:
        report(error=f"expected one argument, the job file, got {len(sys.argv) - 1}")
        raise SystemExit(2)
    try:
        servers = check.from_job(jobs.read(Path(sys.argv[1])))
        with running(servers, sys.argv[1]) as processes:
            watch(servers, processes)
    except (jobs.JobError, ProcessDied) as error:
        report(error=str(error))
        raise SystemExit(1) from None


@contextmanager
def running(servers: Servers, job: str) -> Iterator[Processes]:
    """Starts all processes and kills those still running at the end. They report to our standard output."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**process.worker_environment(), "FEDLOOP_RENDEZVOUS": f"file://{folder}/store"}
        command = [sys.executable, "-P", "-m", "models.pretrain.parameter_server.role", job]
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
    """Returns when worker 0 has succeeded.

    Raises:
        ProcessDied: the training cannot continue.
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
        if not survivable(servers, lost):
            raise ProcessDied(f"{servers.name(rank)} ended with status {status}")


def survivable(servers: Servers, lost: set[int]) -> bool:
    """Whether the training can finish without the processes of these ranks."""
    workers = [rank for rank in lost if rank < servers.workers]
    if 0 in lost or (workers and servers.mode != "k-of-n"):
        return False
    if servers.workers - len(workers) < servers.needed:
        return False
    places = [servers.place(rank)[0] for rank in lost if rank >= servers.workers]
    return all(places.count(shard) < servers.replicas for shard in places)


def _next_to_end(processes: Processes) -> int:
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert ended is not None  # None only with WNOHANG
    for rank, one in processes.items():
        if one.pid == ended.si_pid:
            one.wait()
            return rank
    raise AssertionError(f"process {ended.si_pid} is not one of ours")


if __name__ == "__main__":
    main()
