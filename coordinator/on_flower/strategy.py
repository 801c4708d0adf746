"""A strategy of Fedloop in a stock Flower `ServerApp`: Flower samples nodes and sends messages, ours makes the next model.

What a client computes is the ClientApp's affair, so a strategy whose clients take other steps than plain ones is refused. A reply is
an update if its arrays have the names and shapes of the model and are finite; others are left out, and the log says whose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from coordinator.errors import UserError
from strategies import presets
from strategies.algorithms.fednova import NormalizedMean
from strategies.algorithms.heterofl import HoldersMean
from strategies.algorithms.server_data.server import needs_server
from strategies.client_rules import PlainSGD
from strategies.params import Params, State, difference
from strategies.update import Update

_log = getLogger("flwr")

STEPS, LOSS = "num-steps", "train_loss"
"""Metrics of a reply that a strategy may need."""


class FedloopStrategy(FedAvg):  # type: ignore[misc]  # Flower's types are not followed
    """Aggregates by a strategy of Fedloop. Arrays that are not floating point stay as they are.

    Raises:
        UserError: the strategy or an option is unknown, or its clients take steps of their own.
    """

    def __init__(self, name: str, options: Mapping[str, Any], **of_flower: Any) -> None:
        super().__init__(**of_flower)
        try:
            self._strategy = presets.get(name, **options)
        except presets.OptionError as error:
            raise UserError(str(error)) from None
        if not isinstance(self._strategy.client_rule, PlainSGD):
            possible = (
                each
                for each in presets.ALGORITHMS
                if isinstance(presets.get(each).client_rule, PlainSGD) and not presets.uses_server_data(each)
            )
            raise UserError(
                f"strategy {name!r} changes the steps of clients, which a ClientApp takes by itself; take one of "
                f"{', '.join(possible)}"
            )
        if isinstance(self._strategy.aggregator, HoldersMean):
            raise UserError(
                f"strategy {name!r} gives clients models of different sizes, and a round of Flower sends one to all"
            )
        if needs_server(self._strategy):
            raise UserError(
                f"strategy {name!r} trains a model on the server in each round, which Flower's does not; take another one"
            )
        if "sync" not in self._strategy.modes:
            raise UserError(f"strategy {name!r} is asynchronous, and a round of Flower waits for its clients")
        self._arrays: dict[str, np.ndarray] = {}
        self._state: State | None = None
        self._population = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As Flower's, and keeps the model that the clients start from."""
        self._arrays = {name: array.numpy() for name, array in arrays.items()}
        self._population = len(list(grid.get_node_ids()))
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next model, None if too few updates came, and the mean of the metrics."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid:
            return None, None
        metrics = self.train_metrics_aggr_fn([message.content for message in valid], self.weighted_by_key)
        updates = self._updates(valid)
        needed = self._strategy.aggregator.fewest_updates
        if len(updates) < needed:
            _log.warning(
                "%s needs %s updates, got %s: the model stays as it is",
                self._strategy.name,
                needed,
                len(updates),
            )
            return None, metrics
        return self._apply(updates), metrics

    def _updates(self, replies: Sequence[Message]) -> list[Update]:
        """The updates of the replies that are fit, in the order of their nodes."""
        updates = []
        start = self._trained()
        for message in sorted(replies, key=lambda each: each.metadata.src_node_id):
            arrays = next(iter(message.content.array_records.values()))
            figures = next(iter(message.content.metric_records.values()))
            trained = {name: np.asarray(array.numpy()) for name, array in arrays.items() if name in start}
            shapes = {name: value.shape for name, value in trained.items()}
            if shapes != {name: value.shape for name, value in start.items()} or not all(
                np.isfinite(value).all() for value in trained.values()
            ):
                _log.warning(
                    "the update of node %s is left out: other tensors than the model's, or NaN or infinity",
                    message.metadata.src_node_id,
                )
                continue
            updates.append(self._update(start, trained, figures))
        return updates

    def _update(self, start: Params, trained: Params, figures: MetricRecord) -> Update:
        if isinstance(self._strategy.aggregator, NormalizedMean) and STEPS not in figures:
            raise UserError(
                f"strategy {self._strategy.name!r} needs the number of steps of each client: put {STEPS!r} into the MetricRecord "
                "of the ClientApp's reply"
            )
        examples, steps = max(1, int(figures[self.weighted_by_key])), max(1, int(figures.get(STEPS, 1)))
        return Update(difference(trained, start), examples, steps, float(figures.get(LOSS, 0.0)))

    def _apply(self, updates: Sequence[Update]) -> ArrayRecord:
        params = self._trained()
        state = self._state or self._strategy.init(params, params)
        fold = self._strategy.start(len(updates))
        for position, update in enumerate(updates):
            fold.add(position, self._strategy.transform(update))
        moved, self._state = self._strategy.apply(params, state, fold.finish(), self._population)
        return ArrayRecord(
            {
                name: Array(np.ascontiguousarray(np.asarray(moved.get(name, value)).astype(value.dtype)))
                for name, value in self._arrays.items()
            }
        )

    def _trained(self) -> Params:
        """The arrays that are averaged, float32."""
        return {
            name: np.asarray(value, np.float32)
            for name, value in self._arrays.items()
            if np.issubdtype(value.dtype, np.floating)
        }
