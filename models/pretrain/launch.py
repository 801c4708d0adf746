"""`python -P -m models.pretrain.launch RANKS JOB.json`: starts a job's processes on this host; they exit with it.

The elastic agent runs inside this process, which exits with its parent; the ranks exit with the agent. On SIGTERM
they finish the step and save it. To train on several hosts, run on each

    python -P -m models.pretrain.launch RANKS JOB.json --rendezvous HOST:PORT --hosts MIN:MAX --run NAME

and on one of them, or on another machine, `python -P -m models.pretrain.launch --serve HOST:PORT`. All hosts must see
the job's folder under the same path.
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
    if not arguments.rendezvous or arguments.rendezvous.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not arguments.serve:  # the forkserver imports torch in parallel with this process
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["models.pretrain.recovery.forkserver_imports"])
        forkserver.ensure_running()
    from models.pretrain.recovery import elastic

    if arguments.serve:
        elastic.serve(arguments.serve, report)
        return
    hosts = [int(count) for count in arguments.hosts.split(":")]
    options = (arguments.rendezvous, arguments.run, arguments.restarts)
    fleet = elastic.Fleet(arguments.ranks, hosts[0], hosts[-1], *options)
    sys.exit(elastic.run(arguments.job, fleet, report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m models.pretrain.launch", description=__doc__)
    parser.add_argument("ranks", type=int, nargs="?", help="processes on this host")
    parser.add_argument("job", type=Path, nargs="?", help="JSON file")
    parser.add_argument(
        "--rendezvous", default="", metavar="HOST:PORT", help="rendezvous endpoint of the hosts"
    )
    parser.add_argument("--hosts", default="1", metavar="MIN:MAX", help="how many train together")
    parser.add_argument("--run", default="", help="name of the launch, the same on all hosts")
    parser.add_argument("--restarts", type=int, default=10, help="restarts after failures, at most")
    parser.add_argument("--serve", default="", metavar="HOST:PORT", help="only serve a rendezvous")
    arguments = parser.parse_args()
    if not arguments.serve and arguments.job is None:
        parser.error("RANKS and JOB.json are needed")
    return arguments


if __name__ == "__main__":
    main()
