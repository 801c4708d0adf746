"""Processes that may die, leave and join: torch's elastic agent, extended to know why a process ended.

An agent starts this host's processes, meets the other hosts' agents at the rendezvous, and restarts all processes
when one has died; they resume from the newest checkpoint. Which hosts train together is decided in `models.pretrain.hosts`.

    exit status    killed, or an error    restart all, at most `restarts` times
                   75, preempted          restart all but the preempted ones
                   78, refused            stop: the job is invalid, and would be again
                   79, hung               stop: restarting would not help a process that is only suspended

Processes are forked from a server that has imported everything they need, so restarts cost no imports.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Otherwise workers meet at the store of the rendezvous, where they find the keys of the workers they replace, and
# hang or connect to processes that are gone. Must be set before torch.distributed.elastic reads it.
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous

from edge_client.processes.process import PARENT_VARIABLE, Report
from edge_client.processes.process import serve as serve_job
from models.pretrain.recovery import store
from models.pretrain.recovery.statuses import HUNG, PREEMPTED, REFUSED, UNREACHABLE

MONITOR_SECONDS = 0.1
GRACE_SECONDS = 30
"""Between SIGTERM and SIGKILL, for a step and a checkpoint."""


@dataclass(frozen=True)
class Fleet:
    """The hosts and processes that train together.

    Attributes:
        ranks: processes on this host.
        hosts: their number.
        endpoint: HOST:PORT of the rendezvous; empty: this host alone, with one of its own.
        run: name of the launch, the same on all hosts.
        restarts: restarts after failures, at most.
        join_seconds: how long to wait for all hosts.
        address: of this host for the others.
    """

    ranks: int
    hosts: int = 1
    endpoint: str = ""
    run: str = ""
    restarts: int = 10
    join_seconds: int = 600
    address: str = "127.0.0.1"


class Agent(LocalElasticAgent):
    """Torch's agent of one host. `statuses`: exit statuses of the processes it started last."""

    report: Report

    @property
    def statuses(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def kill(self) -> None:
        """Kills the processes it started, which have nothing to save."""
        for process in self._processes:
            process.kill()

    @property
    def _processes(self) -> list[Any]:
        context = getattr(self._pcontext, "_pc", None)
        return list(context.processes) if context else []

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        statuses = self.statuses
        if any(status not in (None, 0, PREEMPTED, REFUSED) for status in statuses):
            # the others cannot continue without it and have nothing to save, and torch would wait for them
            self.kill()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            statuses = self.statuses
            if {REFUSED, HUNG} & set(statuses):
                self._remaining_restarts = 0
            elif PREEMPTED in statuses and set(statuses) <= {0, PREEMPTED}:
                self._remaining_restarts += 1  # torch subtracts one for this restart
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.report(stage="pretrain", status="restarting", statuses=self.statuses)
        super()._restart_workers(worker_group)


def run(
    job: Path, fleet: Fleet, report: Report, started: Callable[[Agent], None] = lambda agent: None
) -> int:
    """Trains `job` on this host, together with others where the fleet has them; returns an exit status.

    Reports `restarting` on standard output, next to the reports of the processes. `started` gets the agent.
    """
    own = None if fleet.endpoint else store.listen("127.0.0.1")
    endpoint = fleet.endpoint if own is None else f"127.0.0.1:{own.port}"
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=endpoint,
        run_id=fleet.run or str(uuid.uuid4()),
        min_nodes=fleet.hosts,
        max_nodes=fleet.hosts,
        local_addr=fleet.address,
        is_host="false",
        join_timeout=fleet.join_seconds,
        keep_alive_interval=1,
        keep_alive_max_attempt=3,
        last_call_timeout=2,
    )
    try:
        handler = rendezvous.get_rendezvous_handler(parameters)
        return _train(job, fleet, handler, report, started)
    except SignalException as received:
        return 128 + received.sigval
    except (RendezvousConnectionError, DistNetworkError, DistStoreError):
        report(error=f"the rendezvous at {parameters.endpoint} cannot be reached")
        return UNREACHABLE


def _train(
    job: Path,
    fleet: Fleet,
    handler: RendezvousHandler,
    report: Report,
    started: Callable[[Agent], None],
) -> int:
    spec = WorkerSpec(
        role="pretrain",
        local_world_size=fleet.ranks,
        entrypoint=_work,
        args=(str(job),),
        rdzv_handler=handler,
        max_restarts=fleet.restarts,
        monitor_interval=MONITOR_SECONDS,
        local_addr=fleet.address,
    )
    agent = Agent(
        spec,
        DefaultLogsSpecs(),
        start_method="forkserver",
        exit_barrier_timeout=GRACE_SECONDS,
        shutdown_timeout=GRACE_SECONDS,
    )
    agent.report = report
    started(agent)
    try:
        result = agent.run()
    except SignalException as received:
        # the rendezvous stays open: the other hosts continue
        saved = received.sigval == signal.SIGTERM and PREEMPTED in agent.statuses
        return PREEMPTED if saved else 128 + received.sigval
    except RendezvousTimeoutError:
        report(error=f"{fleet.hosts} hosts did not meet at {fleet.endpoint} within {fleet.join_seconds} s")
        return REFUSED
    handler.shutdown()
    if result is None or result.is_failed():
        return REFUSED if REFUSED in agent.statuses else 1
    return 0


def _work(job: str) -> None:
    """One process of a pretraining, forked from the server that `launch` started."""
    # the server exits with the agent, and this process with the server
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    from models.pretrain import training_process

    sys.argv = [training_process.__file__, job]
    serve_job(training_process.work)
