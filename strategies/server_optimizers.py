"""Server optimizers: how the aggregated delta moves the global params.

The delta of a round is used as a negated pseudo-gradient (Reddi 2021, Algorithm 1 and 2).
Arithmetic is float64, results and state are float32. Tensors not in the delta (frozen ones) do not change.
If params or delta are on disk, results are computed as they are read (`strategies.lazy`), each in its own pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from strategies.lazy import cache_last_piece, elementwise, overlay, shape_of
from strategies.params import FloatArray, Tensors, zeros_like
from strategies.state import State, flatten, subtree


class ServerOptimizer(Protocol):
    """`init` creates the state for trainable params; `step` applies one aggregated delta."""

    def init(self, trainable: Tensors) -> State: ...

    def step(self, params: Tensors, delta: Tensors, state: State) -> tuple[Tensors, State]: ...


@dataclass(frozen=True)
class SGD:
    """x ← x + server_lr · v with v ← momentum · v + Δ.

    `momentum = 0, server_lr = 1` is FedAvg (McMahan 2017); with momentum FedAvgM (Hsu 2019, section 4.3).
    """

    server_lr: float = 1.0
    momentum: float = 0.0

    def init(self, trainable: Tensors) -> State:
        if not self.momentum:
            return State()
        return State(arrays=flatten({"momentum": zeros_like(trainable)}))

    def step(self, params: Tensors, delta: Tensors, state: State) -> tuple[Tensors, State]:
        if not self.momentum:
            return overlay(params, elementwise(self._moved, delta, params)), state
        velocity = elementwise(self._velocity, delta, subtree(state.arrays, "momentum"))
        moved = elementwise(self._moved, velocity, params)
        return overlay(params, moved), State(arrays=flatten({"momentum": elementwise(_float32, velocity)}))

    def _moved(self, velocity: FloatArray, x: FloatArray) -> FloatArray:
        return _float32(x.astype(np.float64) + self.server_lr * velocity)

    def _velocity(self, delta: FloatArray, previous: FloatArray) -> FloatArray:
        return self.momentum * previous.astype(np.float64) + delta


AdaptiveKind = Literal["adagrad", "adam", "yogi"]


@dataclass(frozen=True)
class Adaptive:
    """x ← x + server_lr · m / (√v + tau), Reddi 2021, Algorithm 2.

    m ← beta1·m + (1−beta1)·Δ; v by `kind`: adagrad v + Δ²; adam beta2·v + (1−beta2)·Δ²;
    yogi v − (1−beta2)·Δ²·sign(v − Δ²). As in the paper there is no bias correction and v starts at tau².

    With `flower_form` v starts at 0 and Adam's step is scaled by √(1−beta2^(t+1)) / (1−beta1^(t+1)) in
    round t = 1, 2, …, as in `flwr.serverapp.strategy` 1.41, for parity with runs made there.
    """

    kind: AdaptiveKind
    server_lr: float
    beta1: float
    beta2: float
    tau: float
    flower_form: bool = False

    def init(self, trainable: Tensors) -> State:
        start = 0.0 if self.flower_form else self.tau**2
        second = {name: np.full(shape_of(trainable, name), start, np.float32) for name in trainable}
        return State(arrays=flatten({"first": zeros_like(trainable), "second": second}), values={"step": 0})

    def step(self, params: Tensors, delta: Tensors, state: State) -> tuple[Tensors, State]:
        step = int(state.values["step"] or 0) + 1
        rate = self.server_lr * self._bias_correction(step)

        def move(m: FloatArray, v: FloatArray, x: FloatArray) -> FloatArray:
            return _float32(x.astype(np.float64) + rate * m / (np.sqrt(v) + self.tau))

        delta = cache_last_piece(delta)  # a step reads each piece twice, for m and for v
        m = elementwise(self._first_moment, delta, subtree(state.arrays, "first"))
        v = elementwise(self._second_moment, delta, subtree(state.arrays, "second"))
        moved = overlay(params, elementwise(move, m, v, params))
        arrays = flatten({"first": elementwise(_float32, m), "second": elementwise(_float32, v)})
        return moved, State(arrays=arrays, values={"step": step})

    def _first_moment(self, delta: FloatArray, first: FloatArray) -> FloatArray:
        return self.beta1 * first.astype(np.float64) + (1 - self.beta1) * delta

    def _second_moment(self, delta: FloatArray, second: FloatArray) -> FloatArray:
        return _SECOND_MOMENT[self.kind](second.astype(np.float64), delta, self.beta2)

    def _bias_correction(self, step: int) -> float:
        if not (self.flower_form and self.kind == "adam"):
            return 1.0
        return float(np.sqrt(1 - self.beta2 ** (step + 1)) / (1 - self.beta1 ** (step + 1)))


_Moment = Callable[[np.ndarray, np.ndarray, float], np.ndarray]
_SECOND_MOMENT: dict[AdaptiveKind, _Moment] = {
    "adagrad": lambda v, d, beta2: v + d**2,
    "adam": lambda v, d, beta2: beta2 * v + (1 - beta2) * d**2,
    "yogi": lambda v, d, beta2: v - (1 - beta2) * d**2 * np.sign(v - d**2),
}


def _float32(values: FloatArray) -> FloatArray:
    return values.astype(np.float32)
