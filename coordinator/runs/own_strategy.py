"""The strategy of a run. A user's own one runs in worker processes, which on a coordinator are in the sandbox.

    strategy    once: which base it has, and which options are the base's
    aggregate   each round: the deltas travel as one open file without a name, the result comes back with the reply

A strategy class of Flower works in the same way; it also gets the params and what it has kept, and returns the next ones.

So code that `--allow-code` lists never runs in the process that holds the coordinator's keys. The file has no name because
workers can change everything in their run's folder, and could put a link to another file where this process writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from coordinator import extras
from coordinator.errors import UserError
from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.schema import Experiment
from coordinator.experiments.strategy_choice import is_own_strategy, with_relays
from coordinator.rounds import plan
from coordinator.workers.pool import WorkerPool
from edge_client.processes.channel import Frame
from edge_client.wire import arrays
from strategies import own, presets
from strategies.client_rules import ClientRule, PlainSGD, Proximal
from strategies.params import (
    JsonValue,
    NotFinite,
    ShapeMismatch,
    State,
    Tensors,
    elementwise,
    flatten,
    overlay,
    require_finite,
    require_same_shapes,
    select,
    subtree,
)
from strategies.strategy import Strategy, WeightedMean
from strategies.update import Update


def make_strategy(experiment: Experiment, get_pool: Callable[[], WorkerPool], folder: Path) -> Strategy:
    """The strategy of a resolved experiment. `get_pool`: the run's workers, which an own strategy needs.

    `folder`: on the disk that takes the deltas of a round; workers cannot change it.

    Raises:
        UserError: an own strategy cannot be loaded, or an option is neither its nor its base's.
    """
    name, options = experiment.strategy.name, experiment.strategy.options
    if not is_own_strategy(name):
        strategy = with_relays(presets.get(name, **options), experiment.federation)
        return secure_aggregation.with_groups(strategy, experiment.privacy)
    if own.is_flower(name):
        return _of_flower(experiment, get_pool(), folder)
    pool = get_pool()
    described = pool.run_one({"kind": "strategy", "name": name, "options": options}).values

    def aggregate(updates: Sequence[Update]) -> Tensors:
        return _aggregate(experiment, pool, folder, updates)

    return own.compose(name, _base(name, described), aggregate)


def _of_flower(experiment: Experiment, pool: WorkerPool, folder: Path) -> Strategy:
    """A strategy class of Flower (`coordinator.workers.flower_strategy`). Its state is what its object keeps in attributes.

    Raises:
        UserError: the class cannot be used, or tells clients what ours do not do.
    """
    name, options = experiment.strategy.name, experiment.strategy.options
    if lacking := extras.missing(_FLOWER_PART):
        raise UserError(
            f"strategy.name = {name!r} needs {', '.join(lacking)}, not installed here; {extras.how_to_install(_FLOWER_PART)}"
        )
    config = pool.run_one({"kind": "strategy", "name": name, "options": options}).values["config"]
    rule = _rule_of_flower(name, config)

    def step(params: Tensors, state: State, updates: Sequence[Update]) -> tuple[Tensors, State]:
        number = int(state.values.get("round") or 0) + 1
        request = {
            "kind": "aggregate",
            "name": name,
            "options": options,
            "round": number,
            "seed": plan.entropy(experiment.seed, "strategy", number),
            "kept": json.loads(str(state.values.get("kept") or "{}")),
            "updates": [_figures(update) for update in updates],
        }
        trained = select({key: (params, key) for key in updates[0].delta})
        reply = _send(pool, folder, {"params": trained, "kept": state.arrays}, updates, request)
        if reply.values["config"] != config:
            raise UserError(
                f"strategy.name = {name!r}: its configure_train sends {reply.values['config']!r} in round {number}, but clients "
                f"trained by {config!r}, as it sends in round 1; clients do the same work in all rounds"
            )
        tensors = arrays.decode(reply.blobs[0])
        values: dict[str, JsonValue] = {"round": number, "kept": json.dumps(reply.values["kept"])}
        return overlay(params, subtree(tensors, "params")), State(subtree(tensors, "kept"), values)

    return own.WholeStep(name, rule, aggregator=own.KeepUpdates(), modes=("sync",), step=step)


_FLOWER_PART = "Flower apps"
_PROXIMAL = "proximal-mu"
"""What Flower's FedProx tells clients."""


def _rule_of_flower(name: str, config: Mapping[str, Any]) -> ClientRule:
    """What clients do by the config that `configure_train` sends."""
    for key, value in config.items():
        if key != _PROXIMAL:
            raise UserError(
                f"strategy.name = {name!r}: its configure_train tells clients {key} = {value!r}, which Fedloop's clients do not know; "
                f"set their work in [local]. Known is {_PROXIMAL}"
            )
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(
                f"strategy.name = {name!r}: it sends {key} = {value!r}, expected a number, 0 or more"
            )
    mu = float(config.get(_PROXIMAL, 0))
    return Proximal(mu) if mu else PlainSGD()


def _base(name: str, described: Mapping[str, Any]) -> Strategy:
    """The strategy whose mean an own one replaces. `described`: by `coordinator.workers.own_strategy.describe`."""
    base, options = described["base"], described["options"]
    if own.REPLACED in options:
        raise UserError(
            f"strategy.{own.REPLACED}: {name!r} has no such option: it replaces the mean of its base, {base}"
        )
    try:
        strategy = presets.get(base, **options)
    except presets.OptionError as error:
        if error.option is None:
            raise UserError(f"strategy.name = {name!r}: its base {base!r}: {error}") from None
        takes = ", ".join(described["takes"]) or "none"
        raise UserError(f"strategy.{error.option}: {error}; options of {name!r} itself: {takes}") from None
    if presets.is_personal(base):
        raise UserError(
            f"strategy.name = {name!r}: its base {base!r} gives each client a model of its own, which a strategy of one's own "
            "cannot have; take 'fedavg'"
        )
    if not isinstance(strategy.aggregator, WeightedMean):
        raise UserError(
            f"strategy.name = {name!r}: it replaces the mean of its base, and {base!r} has another aggregator; take 'fedavg'"
        )
    return strategy


def _aggregate(experiment: Experiment, pool: WorkerPool, folder: Path, updates: Sequence[Update]) -> Tensors:
    """The delta that the strategy makes of the updates, float64.

    Raises:
        UserError: the strategy failed, or returned something else than a finite delta.
    """
    name = experiment.strategy.name
    request = {
        "kind": "aggregate",
        "name": name,
        "options": experiment.strategy.options,
        "updates": [_figures(update) for update in updates],
    }
    delta = arrays.decode(_send(pool, folder, {}, updates, request).blobs[0])
    try:
        require_same_shapes(delta, updates[0].delta)
        require_finite(delta, delta)
    except (ShapeMismatch, NotFinite) as error:
        raise UserError(
            f"strategy.name = {name!r} returned something else than a delta of this model: {error}"
        ) from None
    return {key: value.astype(np.float64) for key, value in delta.items()}


def _send(
    pool: WorkerPool,
    folder: Path,
    more: Mapping[str, Tensors],
    updates: Sequence[Update],
    request: dict[str, Any],
) -> Frame:
    """The worker's reply to a request about the deltas of the updates, `0/…`, `1/…`, and `more` sets of tensors."""
    deltas = {str(index): elementwise(_float32, update.delta) for index, update in enumerate(updates)}
    with TemporaryFile(dir=folder) as file:
        arrays.write(Path(f"/proc/self/fd/{file.fileno()}"), flatten({**more, **deltas}))
        pool.broadcast({"kind": "updates"}, file=file.fileno())
        reply = pool.run_one(request)
        pool.broadcast({"kind": "updates"})
    return reply


def _figures(update: Update) -> dict[str, Any]:
    return {
        "num_examples": update.num_examples,
        "num_steps": update.num_steps,
        "train_loss": update.train_loss,
    }


def _float32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)
