"""The local-only baseline: every client trains alone, from the same start, and is tested on its own held-out rows.

It says what a client would have without the federation. A client takes as many epochs (or steps) as a client of the run takes
on average: those of rounds x clients_per_round / clients rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.experiments.schema import Experiment
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.rounds.plan import RunPlan, generator
from coordinator.workers.evaluation import decode_evaluation
from coordinator.workers.pool import PoolJob, WorkerPool
from edge_client.train.evaluation import Evaluation
from edge_client.wire.device import TaskMessage
from strategies import client_rules
from strategies.client_rules import PlainSGD
from strategies.params import Params

MAX_SITES = 20
"""Most sites whose models `simulation.local_baseline = "auto"` trains."""


def is_wanted(experiment: Experiment, data_info: Mapping[str, Any]) -> bool:
    """Whether a simulation trains every client alone too."""
    choice, sites = experiment.simulation.local_baseline, data_info["site_names"]
    if choice == "auto":
        return bool(sites) and experiment.data.partition == "natural" and len(sites) <= MAX_SITES
    return choice == "on"


def train_alone(
    pool: WorkerPool,
    run_plan: RunPlan,
    clients: Sequence[SimulatedClient],
    params: Params,
    owners: npt.NDArray[np.int32],
    rounds: int,
    *,
    keep_logits: bool,
) -> Evaluation:
    """Each test row scored by the model that its client trains alone.

    `params`: where every client starts. `owners`: index of the client of each test row. `rounds`: that the run took. The workers have the run's data and model open.
    """
    base = pool.publish(params).sha256
    taken = max(1, round(rounds * min(1, run_plan.closing.wanted / len(clients))))
    replies = pool.run(
        PoolJob(
            client.index,
            {
                "kind": "train_alone",
                "task": _task(run_plan, client.name, base, taken).to_json(),
                "part": client.index,
                "runtime": client.runtime,
                "logits": keep_logits,
            },
        )
        for client in clients
    )
    return _in_row_order({job.key: decode_evaluation(reply) for job, reply in replies}, owners)


def _task(run_plan: RunPlan, client: str, base: str, rounds: int) -> TaskMessage:
    local = run_plan.local
    return TaskMessage(
        round=1,
        client=client,
        base=base,
        seed=int(generator(run_plan.seed, f"alone {client}").integers(2**63)),
        batch_size=local.batch_size,
        lr=local.lr,
        epochs=None if local.epochs is None else local.epochs * rounds,
        steps=None if local.steps is None else local.steps * rounds,
        rule=client_rules.to_options(PlainSGD()),
    )


def _in_row_order(parts: Mapping[int, Evaluation], owners: npt.NDArray[np.int32]) -> Evaluation:
    """The evaluations of all clients as one, in the order of the test rows."""
    count = len(owners)
    correct, labels = np.zeros(count, np.int64), np.zeros(count, np.int64)
    logits = None
    for client, part in sorted(parts.items()):
        own = owners == client
        correct[own], labels[own] = part.correct, part.labels
        if part.logits is not None:
            logits = np.zeros((count, part.logits.shape[1]), np.float32) if logits is None else logits
            logits[own] = part.logits
    loss_sum = sum(part.loss_sum for _, part in sorted(parts.items()))
    return Evaluation(loss_sum, correct, labels, logits)
