"""Model classes of a run on devices: what each trains, how workers score its part of the model, and how that does at the end.

A class is a device class of the experiment with the memory that it needs; which device is in it, `coordinator.scheduling` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator import json_values
from coordinator.experiments import device_classes
from coordinator.experiments.schema import Experiment
from coordinator.runs.population import device_classes as simulated
from coordinator.scheduling.deployments import ModelClass
from coordinator.workers.evaluation import evaluate
from coordinator.workers.pool import WorkerPool
from edge_client.wire.device import BlobRef, ModelRef
from models import widths
from strategies.params import Params, Tensors

Export = Callable[[Mapping[str, Any]], tuple[BlobRef, BlobRef] | None]
"""Makes the artifact of a model and its manifest; None, with a notice, if there is none."""


def set_up(
    experiment: Experiment, model: Mapping[str, Any], params: Params, pool: WorkerPool, reference: ModelRef
) -> tuple[ModelClass, ...]:
    """The classes, the widest first, without artifacts; none if all devices train the same model. `model`, `params`, `reference`: of
    the whole one."""
    least = experiment.strategy.options["memory_mib"] if device_classes.are_used(experiment) else {}
    found = []
    for each in simulated.set_up(experiment, model, params, pool):
        divisors = widths.divisors(reference.name, each.options, each.width) if each.is_narrower else {}
        own = replace(reference, options=each.options, divisors=divisors) if each.is_narrower else reference
        found.append(ModelClass(each.name, each.width, math.ceil(least[each.name] * 2**20), own, each.shapes))
    return tuple(found)


def with_artifacts(
    experiment: Experiment,
    model: Mapping[str, Any],
    classes: Sequence[ModelClass],
    whole: tuple[BlobRef, BlobRef],
    export: Export,
) -> tuple[ModelClass, ...] | None:
    """The classes with an artifact of each; None if one has none. `whole`: that of the whole model."""
    found = []
    for each in classes:
        files: tuple[BlobRef, BlobRef] | None = whole
        if each.is_narrower:
            files = export(device_classes.describe_narrower(experiment, model, each.width))
        if files is None:
            return None
        found.append(replace(each, artifact=files[0], manifest=files[1]))
    return tuple(found)


def describe(
    experiment: Experiment, model: Mapping[str, Any], classes: Sequence[ModelClass]
) -> dict[str, Any]:
    """What workers need to know to score the parts of narrower classes, as part of the model's description."""
    narrower = {
        each.name: {
            **device_classes.describe_narrower(experiment, model, each.width),
            "shapes": {name: list(shape) for name, shape in each.shapes.items()},
        }
        for each in classes
        if each.is_narrower
    }
    return {"narrower": narrower} if narrower else {}


def judge(
    pool: WorkerPool, test_rows: int, params: Tensors, classes: Sequence[ModelClass], task: str
) -> dict[str, dict[str, Any]]:
    """How the part of each class of the final model `params` does on all held-out rows. `task`: of the data; quantities have no accuracy."""
    found = {}
    for each in classes:
        scored = evaluate(pool, test_rows, params, device_class=each.name)
        found[each.name] = {
            "test_accuracy": None if task == "regression" else scored.accuracy,
            "test_loss": json_values.finite(scored.loss),
        }
    return found
