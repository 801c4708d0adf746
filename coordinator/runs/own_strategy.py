"""The strategy of a run. A user's own one runs in worker processes, which on a coordinator are in the sandbox.

    strategy    once: which base it has, and which options are the base's
    aggregate   each round: the deltas travel as one open file without a name, the result comes back with the reply

So code that `--allow-code` lists never runs in the process that holds the coordinator's keys. The file has no name because
workers can change everything in their run's folder, and could put a link to another file where this process writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.experiments.strategy_choice import is_own_strategy, with_relays
from coordinator.workers.pool import WorkerPool
from edge_client.wire import arrays
from strategies import own, presets
from strategies.params import (
    NotFinite,
    ShapeMismatch,
    Tensors,
    elementwise,
    flatten,
    require_finite,
    require_same_shapes,
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
        return with_relays(presets.get(name, **options), experiment.federation)
    pool = get_pool()
    described = pool.run_one({"kind": "strategy", "name": name, "options": options}).values

    def aggregate(updates: Sequence[Update]) -> Tensors:
        return _aggregate(experiment, pool, folder, updates)

    return own.compose(name, _base(name, described), aggregate)


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
        "updates": [
            {
                "num_examples": update.num_examples,
                "num_steps": update.num_steps,
                "train_loss": update.train_loss,
            }
            for update in updates
        ],
    }
    deltas = {str(index): elementwise(_float32, update.delta) for index, update in enumerate(updates)}
    with TemporaryFile(dir=folder) as file:
        arrays.write(Path(f"/proc/self/fd/{file.fileno()}"), flatten(deltas))
        pool.broadcast({"kind": "updates"}, file=file.fileno())
        delta = arrays.decode(pool.run_one(request).blobs[0])
        pool.broadcast({"kind": "updates"})
    try:
        require_same_shapes(delta, updates[0].delta)
        require_finite(delta, delta)
    except (ShapeMismatch, NotFinite) as error:
        raise UserError(
            f"strategy.name = {name!r} returned something else than a delta of this model: {error}"
        ) from None
    return {key: value.astype(np.float64) for key, value in delta.items()}


def _float32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)
