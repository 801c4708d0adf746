"""The global model on the held-out rows, scored by workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coordinator.simulation.frames import Frame
from coordinator.simulation.pool import Job, WorkerPool
from edge_client.train.trainer import EVALUATION_ROWS, Evaluation, merged
from edge_client.wire import arrays
from strategies.params import Tensors

CHUNK_ROWS = 4 * EVALUATION_ROWS
"""Test rows in one job; fixed, so that sums do not depend on the number of workers."""


def evaluate(pool: WorkerPool, test_rows: int, params: Tensors) -> Evaluation:
    """The params on all test rows, by chunks in worker processes, put together in row order."""
    if isinstance(params, arrays.StoredArrays) and isinstance(params.payload, arrays.FilePayload):
        with params.payload.path.open("rb") as file:
            pool.tell({"kind": "candidate"}, file=file.fileno())  # its bytes not through this process
    else:
        pool.tell({"kind": "candidate"}, [arrays.encode(params)])
    starts = range(0, test_rows, CHUNK_ROWS)
    jobs = [Job(start, {"kind": "evaluate", "start": start, "stop": start + CHUNK_ROWS}) for start in starts]
    parts = {job.key: _scored(reply) for job, reply in pool.run(jobs)}
    return merged(parts[start] for start in starts)


def accuracy_by_group(
    scored: Evaluation, group: npt.NDArray[np.int32], names: Sequence[str]
) -> dict[str, float | None]:
    """Accuracy of each group of rows. `group`: index into `names` for each row; None for a group without labels."""
    correct = np.bincount(group, weights=scored.correct, minlength=len(names))
    labels = np.bincount(group, weights=scored.labels, minlength=len(names))
    return {name: float(correct[i] / labels[i]) if labels[i] else None for i, name in enumerate(names)}


def _scored(reply: Frame) -> Evaluation:
    counts = arrays.decode(reply.blobs[0])
    correct, labels = (counts[name].astype(np.int64) for name in ("correct", "labels"))
    return Evaluation(reply.values["loss_sum"], correct, labels)
