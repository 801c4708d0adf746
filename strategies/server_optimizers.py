"""Server optimizers: how the aggregated delta moves the global params.

The delta of a round is used as a pseudo-gradient with its sign turned (Reddi 2021, Algorithm 1 and 2).
Arithmetic is float64, results and state are float32. Tensors not in the delta (frozen ones) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from strategies.params import FloatArray, Params, zeros_like
from strategies.state import State, named, part_of


class ServerOptimizer(Protocol):
    """`init` makes the state for trainable params; `step` applies one aggregated delta."""

    def init(self, trainable: Params) -> State: ...

    def step(self, params: Params, delta: Params, state: State) -> tuple[Params, State]: ...


@dataclass(frozen=True)
class SGD:
    """x ← x + server_lr · v with v ← momentum · v + Δ.

    `momentum = 0, server_lr = 1` is FedAvg (McMahan 2017); with momentum FedAvgM (Hsu 2019, section 4.3).
    """

    server_lr: float = 1.0
    momentum: float = 0.0

    def init(self, trainable: Params) -> State:
        if not self.momentum:
            return State()
        return State(arrays=named("momentum", zeros_like(trainable)))

    def step(self, params: Params, delta: Params, state: State) -> tuple[Params, State]:
        if not self.momentum:
            return _moved(params, {n: self.server_lr * d for n, d in delta.items()}), state
        previous = part_of(state.arrays, "momentum")
        velocity = {n: self.momentum * previous[n].astype(np.float64) + d for n, d in delta.items()}
        moved = _moved(params, {n: self.server_lr * v for n, v in velocity.items()})
        return moved, State(arrays=named("momentum", _float32(velocity)))


AdaptiveKind = Literal["adagrad", "adam", "yogi"]


@dataclass(frozen=True)
class Adaptive:
    """x ← x + server_lr · m / (√v + tau), Reddi 2021, Algorithm 2.

    m ← beta1·m + (1−beta1)·Δ; v by `kind`: adagrad v + Δ²; adam beta2·v + (1−beta2)·Δ²;
    yogi v − (1−beta2)·Δ²·sign(v − Δ²). As in the paper there is no bias correction and v starts at tau².

    With `flower_form` v starts at 0 and Adam's step is scaled by √(1−beta2^(t+1)) / (1−beta1^(t+1)) in
    round t = 1, 2, …, as `flwr.serverapp.strategy` 1.41 does it; for parity with runs made there.
    """

    kind: AdaptiveKind
    server_lr: float
    beta1: float
    beta2: float
    tau: float
    flower_form: bool = False

    def init(self, trainable: Params) -> State:
        start = 0.0 if self.flower_form else self.tau**2
        second = {n: np.full(value.shape, start, np.float32) for n, value in trainable.items()}
        return State(
            arrays=named("first", zeros_like(trainable)) | named("second", second), values={"step": 0}
        )

    def step(self, params: Params, delta: Params, state: State) -> tuple[Params, State]:
        step = int(state.values["step"] or 0) + 1
        first, second = part_of(state.arrays, "first"), part_of(state.arrays, "second")
        grow = _SECOND_MOMENT[self.kind]
        m = {n: self.beta1 * first[n].astype(np.float64) + (1 - self.beta1) * d for n, d in delta.items()}
        v = {n: grow(second[n].astype(np.float64), d, self.beta2) for n, d in delta.items()}
        rate = self.server_lr * self._bias_correction(step)
        moved = _moved(params, {n: rate * m[n] / (np.sqrt(v[n]) + self.tau) for n in delta})
        arrays = named("first", _float32(m)) | named("second", _float32(v))
        return moved, State(arrays=arrays, values={"step": step})

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


def _moved(params: Params, step: Params) -> Params:
    return {
        name: np.asarray(value.astype(np.float64) + step[name], np.float32) if name in step else value
        for name, value in params.items()
    }


def _float32(params: Mapping[str, FloatArray]) -> Params:
    return {name: np.asarray(value, np.float32) for name, value in params.items()}
