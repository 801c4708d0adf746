"""`python -P -m models.pretrain.launch RANKS JOB.json`: starts a job's processes on this host; they exit with it.

The elastic agent runs inside this process, which exits with its parent; the ranks exit with the agent. On SIGTERM
they finish the step and save it. With - for JOB.json, jobs come over standard input
(`edge_client.processes.process.run_from_input`). Several hosts: `models.pretrain.hosts`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

from edge_client.processes import process


def main() -> None:
    process.die_with_parent()
    arguments = _arguments()
    report = process.reporter(sys.stdout)
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # the forkserver imports torch in parallel with this process
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["models.pretrain.recovery.forkserver_imports"])
    forkserver.ensure_running()
    from models.pretrain.recovery import elastic

    def train(job: Path, report: process.Report) -> None:
        sys.exit(elastic.run(job, elastic.Fleet(arguments.ranks), report))

    if str(arguments.job) != process.FROM_INPUT:
        train(arguments.job, report)
    from models.pretrain import check

    sys.exit(process.run_from_input({"": train, "check": check.check}, report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m models.pretrain.launch", description=__doc__)
    parser.add_argument("ranks", type=int, help="processes on this host")
    parser.add_argument("job", type=Path, help="JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
