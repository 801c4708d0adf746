"""The engine that trains a simulation's PyTorch clients: checked before the first round, and handed to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.experiments.schema import Experiment
from coordinator.reports.progress import Progress
from coordinator.workers.pool import WorkerPool


def set_up_engine(
    experiment: Experiment, model: Mapping[str, Any], pool: WorkerPool, progress: Progress
) -> dict[str, Any]:
    """What workers need to know of the engine, as part of the model's description.

    If there is no compiler for "compiled" here, it is "pool", and a note says so.

    Raises:
        UserError: the engine cannot train the model.
    """
    engine, batch_size = experiment.simulation.engine, experiment.local.batch_size
    if engine == "compiled":
        progress.stage("compiling the training step")
    if engine in ("stacked", "compiled"):
        asked = {"kind": "engine", "model": dict(model), "engine": engine, "batch_size": batch_size}
        if why := pool.run_one(asked).values["why"]:
            progress.note(f'simulation.engine = "{engine}" trains as "pool" does: {why}')
            engine = "pool"
    return {"engine": engine, "batch_size": batch_size}
