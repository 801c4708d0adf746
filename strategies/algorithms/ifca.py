"""IFCA: several models, of which each client trains the one that fits its rows best, so that clients of a kind find together. Ghosh 2020, Algorithm 1.

By model averaging: a model becomes the mean of what the clients of a round that chose it made of it; one that nobody chose stays.
Model 1 is the model of the run, the others are streams of the client rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strategies import options
from strategies.own import CohortAggregate, KeepUpdates
from strategies.params import FloatArray, State, Tensors, elementwise, flatten, overlay
from strategies.personalisation import CHOSEN, ClusterModels, cluster_stream
from strategies.strategy import Strategy, WeightedMean, Weighting, clipping
from strategies.update import Aggregate, Update


@dataclass(frozen=True)
class ClusteredStrategy(Strategy):
    """Averages within clusters. `weighting`: of updates within one."""

    weighting: Weighting = "examples"
    server_lr: float = 1.0

    def apply(
        self, params: Tensors, state: State, aggregate: Aggregate, num_clients: int
    ) -> tuple[Tensors, State]:
        assert isinstance(aggregate, CohortAggregate)
        streams = dict(self.broadcast(state))
        by_model: dict[int, list[Update]] = {}
        for update in aggregate.updates:
            by_model.setdefault(int(update.extras[CHOSEN]["model"][0]), []).append(update)
        for model, updates in sorted(by_model.items()):
            if model == 0:
                params = overlay(params, self._moved(params, updates))
            elif cluster_stream(model) in streams:
                streams[cluster_stream(model)] = self._moved(streams[cluster_stream(model)], updates)
        streams[CHOSEN] = {"model": np.ones(1, np.float32)}
        return params, State(flatten({"rule": flatten(streams)}))

    def _moved(self, model: Tensors, updates: Sequence[Update]) -> Tensors:
        fold = WeightedMean(self.weighting).start(len(updates))
        for position, update in enumerate(updates):
            fold.add(position, Update(update.delta, update.num_examples, update.num_steps, update.train_loss))

        def move(delta: FloatArray, x: FloatArray) -> FloatArray:
            return np.asarray(x.astype(np.float64) + self.server_lr * delta, np.float32)

        return elementwise(move, fold.finish().delta, model)


@dataclass(frozen=True)
class IFCA:
    clusters: int = options.field(2, "models, and so groups of clients at most", low=2, high=64)
    server_lr: float = options.server_lr()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        return ClusteredStrategy(
            "ifca",
            ClusterModels(self.clusters),
            clipping(self.clip_norm),
            KeepUpdates(),
            modes=("sync",),
            weighting=self.weighting,
            server_lr=self.server_lr,
        )
