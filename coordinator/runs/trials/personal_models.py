"""The models that clients have of their own after a run (`strategies.personalisation`), scored on their held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.runs.trials.local_baseline import in_row_order
from coordinator.workers.evaluation import decode_evaluation, publish
from coordinator.workers.pool import PoolJob, WorkerPool
from edge_client.train.evaluation import Evaluation
from strategies import client_rules
from strategies.params import Tensors
from strategies.personalisation import ClusterModels, PersonalRule
from strategies.strategy import Strategy


def score(
    pool: WorkerPool,
    strategy: Strategy,
    clients: Sequence[SimulatedClient],
    params: Tensors,
    state_of: Callable[[str], bytes | None],
    owners: npt.NDArray[np.int32],
) -> Evaluation | None:
    """Each test row scored by its client's own model; None if clients have none.

    `params`: the global model, which also serves clients that never took part. `state_of`: a client's encoded state.
    """
    rule = strategy.client_rule
    if not isinstance(rule, PersonalRule):
        return None
    publish(pool, params)
    options = client_rules.to_options(rule)
    replies = pool.run(_job(client, options, state_of(client.name)) for client in clients)
    return in_row_order({job.key: decode_evaluation(reply) for job, reply in replies}, owners)


def _job(client: SimulatedClient, rule: dict[str, Any], state: bytes | None) -> PoolJob:
    values = {"kind": "score_client", "part": client.index, "rule": rule}
    return PoolJob(client.index, values, () if state is None else (state,))


def describe(
    strategy: Strategy,
    clients: Sequence[SimulatedClient],
    trainable: Sequence[str],
    state_of: Callable[[str], bytes | None],
) -> dict[str, Any] | None:
    """For the report: which tensors clients keep to themselves, and how many clients have a model of their own; None if none can.

    `trainable`: names of the tensors that clients train.
    """
    if not isinstance(strategy.client_rule, PersonalRule) or isinstance(strategy.client_rule, ClusterModels):
        return None
    shared = set(strategy.client_rule.shared(trainable))
    return {
        "local_tensors": [name for name in trainable if name not in shared],
        "clients": sum(state_of(client.name) is not None for client in clients),
    }
