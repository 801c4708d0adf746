"""`python -P -m models.pretrain.launch RANKS JOB.json`: a job's processes on this host, in a tree that dies together.

The agent runs inside this process, which dies with its parent; the ranks die with the agent. SIGTERM has them finish a
step and save it. Several hosts train together where each runs

    python -P -m models.pretrain.launch RANKS JOB.json --rendezvous HOST:PORT --hosts LEAST:MOST --run NAME

and one of them, or another machine, `python -P -m models.pretrain.launch --serve HOST:PORT`. Processes of all hosts
must reach the job's folder under the same path.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

from edge_client import process


def main() -> None:
    process.die_with_parent()
    given = _arguments()
    report = process.reporter(sys.stdout)
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not given.rendezvous or given.rendezvous.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not given.serve:
        _prepare()
    from models.pretrain.recovery import elastic

    if given.serve:
        elastic.serve(given.serve, report)
        return
    least, _, most = given.hosts.partition(":")
    fleet = elastic.Fleet(
        given.ranks, int(least), int(most or least), given.rendezvous, given.run, given.restarts
    )
    sys.exit(elastic.run(given.job, fleet, report))


def _prepare() -> None:
    """Starts the server that processes are forked from, which imports torch while this process does."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["models.pretrain.recovery.nursery"])
    forkserver.ensure_running()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m models.pretrain.launch", description=__doc__)
    parser.add_argument("ranks", type=int, nargs="?", help="processes on this host")
    parser.add_argument("job", type=Path, nargs="?", help="JSON file")
    parser.add_argument("--rendezvous", default="", metavar="HOST:PORT", help="where hosts meet")
    parser.add_argument("--hosts", default="1", metavar="LEAST:MOST", help="how many train together")
    parser.add_argument("--run", default="", help="name of the launch, the same on all hosts")
    parser.add_argument("--restarts", type=int, default=10, help="after deaths, at most")
    parser.add_argument(
        "--serve", default="", metavar="HOST:PORT", help="keep a rendezvous, and nothing else"
    )
    given = parser.parse_args()
    if not given.serve and given.job is None:
        parser.error("RANKS and JOB.json are needed")
    return given


if __name__ == "__main__":
    main()
