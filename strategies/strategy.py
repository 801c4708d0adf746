"""A Strategy has four orthogonal parts, which act at two points of a round.

    state = strategy.init(params, trainable)
    each round:  fold = strategy.start(cohort_size); fold.add(position, strategy.transform(update)) …
                 params, state = strategy.apply(params, state, fold.finish(), num_clients)

Every part is a small pure value; an algorithm (`strategies.algorithms`) is a composition under a known name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from strategies.aggregators import Aggregator, Fold, WeightedMean
from strategies.client_rules import ClientRule, PlainSGD, Streams
from strategies.lazy import elementwise, select
from strategies.params import Tensors
from strategies.server_optimizers import SGD, ServerOptimizer
from strategies.state import State, flatten, subtree, unflatten
from strategies.update import Aggregate, Update


class UpdateTransform(Protocol):
    """A pure change to one accepted update before it is folded."""

    def __call__(self, update: Update) -> Update: ...


@dataclass(frozen=True)
class ClipNorm:
    """Scales a delta whose L2 norm over all tensors exceeds `max_norm` down to it. McMahan 2018, section 3.1."""

    max_norm: float

    def __call__(self, update: Update) -> Update:
        if update.norm <= self.max_norm:
            return update
        factor = np.float32(self.max_norm / update.norm)
        return replace(update, delta=elementwise(lambda value: value * factor, update.delta))


@dataclass(frozen=True)
class Strategy:
    """A federated algorithm: client rule, update transforms, aggregator, server optimizer."""

    name: str
    client_rule: ClientRule = PlainSGD()  # noqa: RUF009 - a frozen value
    transforms: tuple[UpdateTransform, ...] = ()
    aggregator: Aggregator = WeightedMean()  # noqa: RUF009 - a frozen value
    server_optimizer: ServerOptimizer = SGD()  # noqa: RUF009 - a frozen value

    def init(self, params: Tensors, trainable: Collection[str]) -> State:
        """State before round 1, for the tensors of `params` named in `trainable`."""
        learned = select({name: (params, name) for name in params if name in trainable})
        optimizer = self.server_optimizer.init(learned)
        return _state(optimizer, self.client_rule.init(learned))

    def broadcast(self, state: State) -> Streams:
        """The streams that accompany the params of the coming round, such as SCAFFOLD's control variate."""
        return unflatten(subtree(state.arrays, "rule"))

    def start(self, cohort_size: int) -> Fold:
        """A fold over the canonical positions of a cohort."""
        return self.aggregator.start(cohort_size)

    def transform(self, update: Update) -> Update:
        """The update after every transform, in order."""
        for change in self.transforms:
            update = change(update)
        return update

    def apply(
        self, params: Tensors, state: State, aggregate: Aggregate, num_clients: int
    ) -> tuple[Tensors, State]:
        """Params and state after the round. `num_clients` is the whole population, not the cohort.

        If their inputs are on disk, both are computed as they are read.
        """
        before = State(subtree(state.arrays, "optimizer"), state.values)
        moved, after = self.server_optimizer.step(params, aggregate.delta, before)
        streams = self.client_rule.advance(self.broadcast(state), aggregate, num_clients)
        return moved, _state(after, streams)


def _state(optimizer: State, streams: Streams) -> State:
    return State(flatten({"optimizer": optimizer.arrays, "rule": flatten(streams)}), optimizer.values)
