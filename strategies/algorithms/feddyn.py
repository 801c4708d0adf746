"""FedDyn: a dynamic regularizer aligns the clients' optima with that of all. Acar 2021, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strategies import options
from strategies.client_rules import DynamicRegularizer
from strategies.params import (
    FloatArray,
    State,
    Tensors,
    cache_last_piece,
    elementwise,
    flatten,
    overlay,
    subtree,
    zeros_like,
)
from strategies.strategy import Strategy, WeightedMean, clipping


@dataclass(frozen=True)
class DynamicServer:
    """h ← h − alpha · share · Δ, then x ← x + Δ − h / alpha, where Δ is the mean of the round's clients."""

    alpha: float

    def init(self, trainable: Tensors) -> State:
        return State(arrays=flatten({"gradient": zeros_like(trainable)}))

    def step(self, params: Tensors, delta: Tensors, state: State, share: float) -> tuple[Tensors, State]:
        delta = cache_last_piece(delta)

        def renew(d: FloatArray, h: FloatArray) -> FloatArray:
            return h.astype(np.float64) - self.alpha * share * d

        def move(d: FloatArray, h: FloatArray, x: FloatArray) -> FloatArray:
            return (x.astype(np.float64) + d - h / self.alpha).astype(np.float32)

        gradient = elementwise(renew, delta, subtree(state.arrays, "gradient"))
        moved = overlay(params, elementwise(move, delta, gradient, params))
        kept = elementwise(lambda h: h.astype(np.float32), gradient)
        return moved, State(arrays=flatten({"gradient": kept}))


@dataclass(frozen=True)
class FedDyn:
    alpha: float = options.field(0.01, "weight of the regularizer", low=0.0, low_open=True)
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        rule, server = DynamicRegularizer(self.alpha), DynamicServer(self.alpha)
        clips = clipping(self.clip_norm)
        return Strategy("feddyn", rule, clips, WeightedMean("uniform"), server, modes=("sync",))
