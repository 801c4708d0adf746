"""The clients of an audited experiment, and what they send: each update is made by the code that makes it in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.rounds import plan as plans
from coordinator.rounds.plan import RunPlan, generator
from coordinator.workers.pool import PoolJob, WorkerPool
from coordinator.workers.workspace_arrays import Workspace, open_workspace
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from strategies import client_rules
from strategies.client_rules import PlainSGD
from strategies.params import Params, flatten, materialize
from strategies.update import Update

if TYPE_CHECKING:
    from coordinator.runs.simulation import Prepared

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Audited:
    """A prepared experiment.

    Attributes:
        data: of the run. `names`: of the clients, in the order of its parts.
        target: index of the client that is attacked.
        cohort: clients in a round.
    """

    experiment: Experiment
    pool: WorkerPool
    prepared: Prepared
    run_plan: RunPlan
    data: Workspace
    target: int
    cohort: int

    @property
    def names(self) -> list[str]:
        return [client.name for client in self.prepared.clients]

    @property
    def others(self) -> list[int]:
        """Indices of the other clients, in an order drawn by the seed."""
        order = self.rng("other clients").permutation(len(self.names)).tolist()
        return [index for index in order if index != self.target]

    def rng(self, purpose: str, number: int = 0) -> np.random.Generator:
        return generator(self.experiment.seed, f"privacy audit: {purpose}", number)

    def rows_of(self, index: int) -> Rows:
        return np.array(self.data.part(index), np.int64)


def find_target(prepared: Prepared, wanted: str | None) -> int:
    """The index of the client that is attacked: the one of this name, else the first one.

    Raises:
        UserError: there is no such client, or it has no rows.
    """
    names = [client.name for client in prepared.clients]
    if wanted is None:
        return next(client.index for client in prepared.clients if client.num_examples)
    if wanted not in names:
        shown = ", ".join(names[:5]) + ("" if len(names) <= 5 else f", … {names[-1]}")
        raise UserError(f"--client {wanted}: the experiment has no such client; expected one of {shown}")
    if not prepared.clients[names.index(wanted)].num_examples:
        raise UserError(f"--client {wanted}: this client has no rows to reconstruct; name another one")
    return names.index(wanted)


def open_audited(
    experiment: Experiment, pool: WorkerPool, prepared: Prepared, run_plan: RunPlan, wanted: str | None
) -> Audited:
    data = open_workspace(prepared.folder)
    cohort = min(run_plan.closing.wanted, len(prepared.clients))
    return Audited(experiment, pool, prepared, run_plan, data, find_target(prepared, wanted), cohort)


def single_updates(audited: Audited, chosen: Sequence[tuple[int, int]]) -> list[Update]:
    """The update of one SGD step on a single row, of each (client, row)."""
    tasks = _tasks(audited, [client for client, _ in chosen])
    plain = [
        replace(
            task,
            epochs=None,
            steps=1,
            rule=client_rules.to_options(PlainSGD()),
            momentum=0.0,
            clip_grad_norm=0.0,
            optimizer=None,
            code=None,
        )
        for task in tasks
    ]
    return _train(audited, plain, [(client, np.array([row], np.int64)) for client, row in chosen], {})


def local_updates(audited: Audited, clients: Sequence[int]) -> list[Update]:
    """What these clients send in the first round."""
    strategy = audited.run_plan.strategy
    state = strategy.init(audited.prepared.params, audited.run_plan.trainable)
    streams = {name: materialize(each) for name, each in strategy.broadcast(state).items()}
    work = [(client, audited.rows_of(client)) for client in clients]
    return _train(audited, _tasks(audited, clients), work, streams)


def _tasks(audited: Audited, clients: Sequence[int]) -> list[TaskMessage]:
    base = audited.pool.publish(audited.prepared.params).sha256
    names = [audited.names[client] for client in clients]
    return [each.message for each in plans.make_tasks(names, 1, base, audited.run_plan)]


def _train(
    audited: Audited,
    tasks: Sequence[TaskMessage],
    work: Sequence[tuple[int, Rows]],
    streams: dict[str, Params],
) -> list[Update]:
    encoded = arrays.encode(flatten(streams))
    jobs = (
        PoolJob(
            number,
            {
                "kind": "audit",
                "work": "update",
                "task": task.to_json(),
                "runtime": audited.prepared.clients[client].runtime,
                "rows": rows.tolist(),
            },
            (encoded,),
        )
        for number, (task, (client, rows)) in enumerate(zip(tasks, work, strict=True))
    )
    found: dict[int, Update] = {}
    for job, reply in audited.pool.run(jobs):
        found[job.key] = Update(arrays.decode(reply.blobs[0]), reply.values["examples"], 1, 0.0)
    return [found[number] for number in range(len(tasks))]


def row_losses(audited: Audited, params: Params, rows: Rows) -> npt.NDArray[np.float64]:
    """The loss of a model on each of these rows."""
    audited.pool.publish(params)
    chunk = 1024
    request: dict[str, Any] = {"kind": "audit", "work": "losses"}
    jobs = (
        PoolJob(at, {**request, "rows": rows[at : at + chunk].tolist()}) for at in range(0, len(rows), chunk)
    )
    parts = {job.key: arrays.decode(reply.blobs[0])["losses"] for job, reply in audited.pool.run(jobs)}
    return np.concatenate([np.zeros(0), *(parts[at] for at in sorted(parts))]).astype(np.float64)
