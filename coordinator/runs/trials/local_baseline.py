"""Models of single clients: each trains on its own rows, from a model that all start from, and is tested on its own held-out rows.

From the initial model this is the local-only baseline: what a client would have without the federation. It takes as many epochs (or
steps) as a client of the run takes on average: those of rounds x clients_per_round / clients rounds.

From the final model it is fine-tuning: what a client has that adapts the federation's model to its own data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.experiments import device_classes
from coordinator.experiments.schema import Experiment
from coordinator.experiments.sections import FineTune
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.rounds.plan import LocalWork, RunPlan, generator
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
    if device_classes.are_used(experiment):
        return False  # not every client can train the whole model
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
    taken = max(1, round(rounds * min(1, run_plan.closing.wanted / len(clients))))
    local = run_plan.local
    work = replace(
        local,
        epochs=None if local.epochs is None else local.epochs * taken,
        steps=None if local.steps is None else local.steps * taken,
    )
    if run_plan.strategy.client_rule.full_batch:
        work = replace(local, epochs=taken, steps=None)
    return _train_each(pool, "alone", run_plan.seed, work, clients, params, owners, keep_logits=keep_logits)


def fine_tune(
    pool: WorkerPool,
    run_plan: RunPlan,
    chosen: FineTune,
    clients: Sequence[SimulatedClient],
    params: Params,
    owners: npt.NDArray[np.int32],
) -> Evaluation:
    """Each test row scored by the model that its client has fine-tuned. `params`: the final model."""
    lr = run_plan.local.lr if chosen.lr is None else chosen.lr
    work = replace(run_plan.local, lr=lr, epochs=chosen.epochs, steps=None)
    seed = run_plan.seed
    return _train_each(pool, "fine-tuned", seed, work, clients, params, owners, keep_logits=False)


def _train_each(
    pool: WorkerPool,
    purpose: str,
    seed: int,
    work: LocalWork,
    clients: Sequence[SimulatedClient],
    params: Params,
    owners: npt.NDArray[np.int32],
    *,
    keep_logits: bool,
) -> Evaluation:
    base = pool.publish(params).sha256
    replies = pool.run(
        PoolJob(
            client.index,
            {
                "kind": "train_alone",
                "task": TaskMessage(
                    round=1,
                    client=client.name,
                    base=base,
                    seed=int(generator(seed, f"{purpose} {client.name}").integers(2**63)),
                    batch_size=work.batch_size,
                    lr=work.lr,
                    epochs=work.epochs,
                    steps=work.steps,
                    rule=client_rules.to_options(PlainSGD()),
                    momentum=work.momentum,
                    clip_grad_norm=work.clip_grad_norm,
                    optimizer=work.optimizer_options,
                ).to_json(),
                "part": client.index,
                "runtime": client.runtime,
                "logits": keep_logits,
            },
        )
        for client in clients
    )
    return in_row_order({job.key: decode_evaluation(reply) for job, reply in replies}, owners)


def in_row_order(parts: Mapping[int, Evaluation], owners: npt.NDArray[np.int32]) -> Evaluation:
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
