"""Models of different architectures in a simulation, one for each device class (FedDF)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments import device_classes
from coordinator.experiments.by_strategy import architectures
from coordinator.experiments.schema import Experiment, Model
from coordinator.fleets.simulated_clients import DeviceClass
from coordinator.workers.pool import WorkerPool
from coordinator.workers.server_work import PoolServer
from edge_client.wire import arrays
from strategies.algorithms.server_data.feddf import EnsembleDistillation
from strategies.algorithms.server_data.server import RUN_MODEL, needs_server, uses_labels, with_server
from strategies.params import Params
from strategies.slices import shapes_of
from strategies.strategy import Strategy

Build = Callable[[Experiment, Mapping[str, Any]], tuple[Any, Params, tuple[str, ...]]]
"""`model_setup.set_up_model` for a description of a model, and the experiment as if it were the run's own."""


def set_up(
    experiment: Experiment, model: Mapping[str, Any], params: Params, pool: WorkerPool, build: Build
) -> tuple[DeviceClass, ...]:
    """The device classes of a run with several architectures, those that need the most memory first; else none. `model`, `params`: of
    the run's own model.

    Raises:
        UserError: the model of a class cannot be built for the data.
    """
    classes = architectures.classes_of(experiment)
    shares = device_classes.shares_of(experiment) if classes else {}
    found = []
    for name, own in classes.items():
        built, other = params, None
        trained: tuple[str, ...] = ()
        if name != architectures.run_class(experiment, classes):
            chosen = Model.model_validate({"name": own["name"], **own["options"]})
            described, other = {**model, **own}, own["name"]
            try:
                _, built, trained = build(experiment.model_copy(update={"model": chosen}), described)
            except UserError as error:
                raise UserError(f"strategy.classes: {name}: {error}") from None
            _require_torch(name, described, pool)
        size, initial = len(arrays.encode(built)), built if other else {}
        found.append(
            DeviceClass(
                name, 1.0, shares[name], shapes_of(built), size, own["options"], other, trained, initial
            )
        )
    return tuple(found)


def equip(
    strategy: Strategy,
    experiment: Experiment,
    data_info: Mapping[str, Any],
    model: Mapping[str, Any],
    own: Mapping[str, tuple[int, ...]],
    classes: Sequence[DeviceClass],
    pool: WorkerPool,
) -> Strategy:
    """The strategy with what its server needs; one that needs nothing as it is. `model`: of the run; `own`: shapes of its trained tensors.

    Raises:
        UserError: the server's rows, or the models, are none that the strategy can work with.
    """
    if not needs_server(strategy):
        return strategy
    _require_rows(strategy, data_info)
    server = PoolServer(pool, experiment.seed)
    if not isinstance(strategy.aggregator, EnsembleDistillation):
        return with_server(strategy, server)
    if data_info["task"] != "classification":
        raise UserError(
            f"strategy.name = {strategy.name!r} averages what models answer for classes, but the data is for {data_info['task']!r}"
        )
    _require_torch("", model, pool)
    others = [each for each in classes if each.model is not None]
    shapes = {RUN_MODEL: dict(own), **{each.name: each.trained_shapes for each in others}} if others else {}
    _require_different(shapes)
    equipped = with_server(strategy, server, shapes=shapes)
    return replace(equipped, class_models={each.name: each.initial for each in others})


def _require_rows(strategy: Strategy, data_info: Mapping[str, Any]) -> None:
    found = data_info["server"]
    if not found["rows"]:
        raise UserError(
            f"strategy.name = {strategy.name!r} needs rows of the server's own, and the data set has none"
        )
    if not found["labelled"] and uses_labels(strategy):
        raise UserError(
            f"strategy.name = {strategy.name!r} trains on the server's own rows, and none of the {found['rows']} has a label"
        )


def _require_torch(name: str, model: Mapping[str, Any], pool: WorkerPool) -> None:
    """Refuses models that are not distilled."""
    reply = pool.run_one({"kind": "framework", "model": dict(model)})
    if reply.values["framework"] != "torch":
        where = f"strategy.classes: {name}: " if name else ""
        raise UserError(
            f"{where}model.name = {model['name']!r} is a Keras model, and FedDF distils PyTorch models; take another one"
        )


def _require_different(shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    for (one, own), (other, its) in combinations(shapes.items(), 2):
        if own == its:
            raise UserError(
                f"strategy.classes: the model of {other} and {f'that of {one}' if one else 'the model of the run'} train tensors of the "
                "same names and shapes, by which the server tells updates apart; take another model for one of them"
            )
