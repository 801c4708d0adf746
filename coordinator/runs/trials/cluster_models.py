"""The models of a clustered run (`strategies.algorithms.ifca`): which client each fits best, how it does there, and its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.runs.trials.local_baseline import in_row_order
from coordinator.workers.evaluation import CLUSTERS, decode_evaluation
from coordinator.workers.pool import PoolJob, WorkerPool
from coordinator.workers.workspace_arrays import open_workspace
from edge_client.files import write_durably
from edge_client.train.evaluation import Evaluation
from edge_client.wire import arrays
from strategies import client_rules
from strategies.params import State, Tensors, flatten, materialize
from strategies.personalisation import ClusterModels
from strategies.strategy import Strategy


def judge(
    pool: WorkerPool,
    strategy: Strategy,
    state: State,
    clients: Sequence[SimulatedClient],
    params: Tensors,
    folder: Path,
    out: Path,
) -> tuple[Evaluation | None, dict[str, dict[str, Any]] | None]:
    """Each test row scored by the model that its client chooses, and for the report each model by its number; None if the strategy has one.

    Every client chooses as in a round: the least loss on its training rows. Model 1 is `params`; the others are in `out` afterwards.
    `folder`: of the workspace.
    """
    rule = strategy.client_rule
    if not isinstance(rule, ClusterModels):
        return None, None
    owners = open_workspace(folder).owners
    streams = strategy.broadcast(state)
    pool.publish(flatten_beside(params, streams))
    options = client_rules.to_options(rule)
    jobs = [
        PoolJob(each.index, {"kind": "score_client", "part": each.index, "rule": options}) for each in clients
    ]
    parts, chosen = {}, {}
    for job, reply in pool.run(jobs):
        parts[job.key], chosen[job.key] = decode_evaluation(reply), int(reply.values["chosen"])
    scored, report = in_row_order(parts, owners), {}
    for number, model in enumerate(rule.candidates(params, streams)):
        members = [each for each in clients if chosen[each.index] == number]
        rows = np.isin(owners, [each.index for each in members])
        file = "model.safetensors" if number == 0 else f"model-cluster-{number + 1}.safetensors"
        if number:
            write_durably(out / file, arrays.encode(materialize(model)))
        labels = int(scored.labels[rows].sum())
        report[str(number + 1)] = {
            "clients": len(members),
            "names": [each.name for each in members],
            "test_rows": int(rows.sum()),
            "test_accuracy": int(scored.correct[rows].sum()) / labels if labels else None,
            "file": file,
        }
    return scored, report


def flatten_beside(params: Tensors, streams: Any) -> Tensors:
    """The params, and the streams in a part of their own."""
    beside = flatten({CLUSTERS: flatten(streams)})
    return {**materialize(params), **materialize(beside)}
