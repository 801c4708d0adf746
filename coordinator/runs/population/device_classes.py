"""Device classes in a simulation: the model of each, and how it does at the end.

    set_up      builds the narrower models once, to know the shapes of their params
    describe    says how workers build them, with their artifacts if LiteRT clients take part
    judge       scores the part of the final model that each class holds, and stores it

A part is stored as params of the catalog's model of that size, without the scaler of the training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator import json_values
from coordinator.experiments import device_classes
from coordinator.experiments.by_strategy import architectures
from coordinator.experiments.schema import Experiment
from coordinator.fleets.simulated_clients import DeviceClass, SimulatedClient
from coordinator.model_references import PARAMS
from coordinator.workers.evaluation import evaluate
from coordinator.workers.pool import WorkerPool
from edge_client.files import write_durably
from edge_client.wire import arrays
from models import widths
from models.conversion.request_cache import Exported
from strategies.params import Params, Tensors, materialize
from strategies.slices import require_slices, shapes_of, take


def set_up(
    experiment: Experiment, model: Mapping[str, Any], params: Params, pool: WorkerPool
) -> tuple[DeviceClass, ...]:
    """The device classes of a run, the widest first; none without widths. `model`, `params`: of the whole model."""
    shares = device_classes.shares_of(experiment) if device_classes.are_used(experiment) else {}
    found = []
    for name, width in device_classes.classes_of(experiment).items():
        own, options = params, dict(model["options"])
        if width < 1:
            described = device_classes.describe_narrower(experiment, model, width)
            own = _build(experiment, described, pool)
            require_slices(shapes_of(own), shapes_of(params))
            options = widths.scale_options(model["name"], model["options"], width)
        found.append(DeviceClass(name, width, shares[name], shapes_of(own), len(arrays.encode(own)), options))
    return tuple(found)


def describe(
    experiment: Experiment,
    model: Mapping[str, Any],
    clients: Sequence[SimulatedClient],
    export: Callable[[Mapping[str, Any]], Exported],
) -> dict[str, Any]:
    """What workers need to know of the models that are not the run's own, as part of the model's description. `export`: makes the artifact of a model."""
    classes = {
        each.device_class for each in clients if each.device_class and each.device_class.has_other_model
    }
    narrower: dict[str, Any] = {}
    for each in sorted(classes, key=lambda found: (-found.width, found.name)):
        described = (
            device_classes.describe_narrower(experiment, model, each.width)
            if each.model is None
            else {**model, "name": each.model, "options": dict(each.options)}
        )
        narrower[each.name] = {**described, "shapes": {name: list(s) for name, s in each.shapes.items()}}
        if any(client.runtime == "litert" and client.device_class == each for client in clients):
            exported = export(described)
            narrower[each.name] |= {"tflite": str(exported.tflite), "manifest": str(exported.manifest)}
    return {"narrower": narrower} if narrower else {}


def judge(
    experiment: Experiment,
    pool: WorkerPool,
    test_rows: int,
    params: Tensors,
    clients: Sequence[SimulatedClient],
    task: str,
    out: Path,
    class_models: Mapping[str, Tensors],
) -> dict[str, dict[str, Any]] | None:
    """How each class's part of the final model `params` does on all held-out rows, and what a client of it receives; None without classes.

    `task`: of the data; quantities have no accuracy. `class_models`: the final params of classes whose model is not a part of it. A model
    that is not the run's own is in `out` afterwards, for the catalog's model with the `options` of the class.
    """
    counts = Counter(each.device_class for each in clients if each.device_class is not None)
    found = {}
    for each in sorted(counts, key=lambda one: (-one.width, one.name)):
        whole = class_models.get(each.name, params)
        scored = evaluate(pool, test_rows, whole, device_class=each.name)
        part, file = materialize(take(whole, each.shapes)), PARAMS
        if each.has_other_model:
            file = f"model-{each.name}.safetensors"
            plain: Tensors = part
            if each.is_narrower:
                plain = widths.fold_scaler(part, experiment.model.name or "", each.options, each.width)
            write_durably(out / file, arrays.encode(plain))
        found[each.name] = {
            **_what(experiment, each),
            "clients": counts[each],
            "params": sum(value.size for value in part.values()),
            "model_bytes": each.model_bytes,
            "test_accuracy": None if task == "regression" else scored.accuracy,
            "test_loss": json_values.finite(scored.loss),
            "options": dict(each.options),
            "file": file,
        }
    return found or None


def _what(experiment: Experiment, each: DeviceClass) -> dict[str, Any]:
    """What the clients of a class train: a width of the run's model, or a model by its name."""
    if architectures.are_used(experiment):
        return {"model": each.model or experiment.model.name}
    return {"width": each.width}


def _build(experiment: Experiment, described: Mapping[str, Any], pool: WorkerPool) -> Params:
    """Fresh params of a narrower model."""
    reply = pool.run_one({"kind": "initial", "model": dict(described), "seed": experiment.seed})
    return materialize(arrays.decode(reply.blobs[0]))
