"""Evaluation of the global model on the held-out rows, in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.workers.pool import PoolJob, WorkerPool
from edge_client.processes.channel import Frame
from edge_client.train.evaluation import EVALUATION_ROWS, Evaluation, merge
from edge_client.wire import arrays
from strategies.params import Tensors

CHUNK_ROWS = 4 * EVALUATION_ROWS
"""Test rows per job; fixed, so that sums do not depend on the number of workers."""


def evaluate(
    pool: WorkerPool,
    test_rows: int,
    params: Tensors,
    *,
    keep_logits: bool = False,
    device_class: str | None = None,
) -> Evaluation:
    """The evaluation of `params` on all test rows: chunks run in the workers and are merged in row order.

    `device_class`: whose part of the model is scored; None: the whole model.
    """
    publish(pool, params)
    starts = range(0, test_rows, CHUNK_ROWS)
    request = {"kind": "evaluate", "logits": keep_logits, "class": device_class}
    jobs = [PoolJob(start, {**request, "start": start, "stop": start + CHUNK_ROWS}) for start in starts]
    parts = {job.key: decode_evaluation(reply) for job, reply in pool.run(jobs)}
    return merge(parts[start] for start in starts)


CLUSTERS = "clusters"
"""The part of published params that holds the streams of a strategy with several models."""


def publish(pool: WorkerPool, params: Tensors) -> None:
    """Gives every worker the params that it scores."""
    if isinstance(params, arrays.StoredArrays) and isinstance(params.payload, arrays.FilePayload):
        pool.publish_file(params.payload.path)  # keeps the bytes out of this process
    else:
        pool.publish(params)


def accuracy_of_tested(
    scored: Evaluation, group: npt.NDArray[np.int32], names: Sequence[str]
) -> dict[str, float]:
    """Accuracy of each group of rows that has labels. `group`: index into `names` for each row."""
    correct = np.bincount(group, weights=scored.correct, minlength=len(names))
    labels = np.bincount(group, weights=scored.labels, minlength=len(names))
    tested = np.flatnonzero(labels).tolist()
    return {names[index]: float(correct[index] / labels[index]) for index in tested}


def score_sites(
    scored: Evaluation, sites: npt.NDArray[np.int32], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Rows and accuracy of each site. `sites`: index into `names` for each row."""
    rows = np.bincount(sites, minlength=len(names))
    accuracy = accuracy_of_tested(scored, sites, names)
    return {
        name: {"test_rows": int(rows[i]), "test_accuracy": accuracy.get(name)} for i, name in enumerate(names)
    }


def encode_evaluation(result: Evaluation) -> tuple[dict[str, Any], list[bytes]]:
    """A worker's reply that holds an evaluation."""
    per_row: dict[str, npt.NDArray[Any]] = {"correct": result.correct, "labels": result.labels}
    if result.logits is not None:
        per_row["logits"] = result.logits
    return {"loss_sum": result.loss_sum}, [arrays.encode(per_row)]


def decode_evaluation(reply: Frame) -> Evaluation:
    """The evaluation in a worker's reply."""
    per_row = arrays.decode(reply.blobs[0])
    correct, labels = (per_row[name].astype(np.int64) for name in ("correct", "labels"))
    logits = np.asarray(per_row["logits"], np.float32) if "logits" in per_row else None
    return Evaluation(reply.values["loss_sum"], correct, labels, logits)
