"""The server optimizers are the papers' equations, written here once more, one element at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from strategies import presets
from strategies.own import CohortAggregate
from strategies.params import Params
from strategies.strategy import Strategy
from strategies.update import Aggregate, Update

LR, BETA1, BETA2, TAU, MOMENTUM = 0.05, 0.8, 0.95, 1e-2, 0.6
ROUNDS = 8


def deltas() -> list[float]:
    return [float(np.float32(d)) for d in np.random.default_rng(3).normal(0, 0.2, ROUNDS)]


def trajectory(strategy: Strategy) -> list[float]:
    params: Params = {"w": np.array([1.0], np.float32)}
    state = strategy.init(params, ["w"])
    seen = []
    for delta in deltas():
        aggregate = Aggregate({"w": np.array([delta])}, {}, num_updates=1, num_examples=1, train_loss=0.0)
        params, state = strategy.apply(params, state, aggregate, num_clients=1)
        seen.append(float(params["w"][0]))
    return seen


def reddi_2021_algorithm_2(kind: str, beta1: float) -> list[float]:
    x, m, v = 1.0, 0.0, TAU**2
    seen = []
    for delta in deltas():
        m = beta1 * m + (1 - beta1) * delta
        square = delta * delta
        if kind == "fedadagrad":
            v = v + square
        elif kind == "fedyogi":
            v = v - (1 - BETA2) * square * math.copysign(1.0, v - square)
        else:
            v = BETA2 * v + (1 - BETA2) * square
        x = x + LR * m / (math.sqrt(v) + TAU)
        seen.append(x)
    return seen


@pytest.mark.parametrize("kind", ["fedadam", "fedyogi", "fedadagrad"])
def test_adaptive_optimizers_are_those_of_the_paper(kind: str) -> None:
    options = {"server_lr": LR, "beta1": BETA1, "tau": TAU} | (
        {} if kind == "fedadagrad" else {"beta2": BETA2}
    )
    # Float32 params and state against float64: below 1e-7 a round.
    np.testing.assert_allclose(
        trajectory(presets.get(kind, **options)),
        reddi_2021_algorithm_2(kind, BETA1),
        rtol=0,
        atol=ROUNDS * 1e-7,
    )


def test_server_momentum_is_that_of_hsu_2019() -> None:
    x, velocity, expected = 1.0, 0.0, []
    for delta in deltas():
        velocity = MOMENTUM * velocity + delta
        x = x + LR * velocity
        expected.append(x)
    actual = trajectory(presets.get("fedavgm", server_lr=LR, momentum=MOMENTUM))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ROUNDS * 1e-7)


def test_nesterov_momentum_is_that_of_torch() -> None:
    weight = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM, nesterov=True)
    expected = []
    for delta in deltas():
        weight.grad = torch.tensor([-delta], dtype=torch.float64)
        optimizer.step()
        expected.append(float(weight.detach()))
    for name in ("fedavgm", "diloco"):
        actual = trajectory(presets.get(name, server_lr=LR, momentum=MOMENTUM, nesterov=True))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=ROUNDS * 1e-7)


def test_without_momentum_fedavgm_is_fedavg() -> None:
    assert trajectory(presets.get("fedavgm", momentum=0.0, nesterov=True)) == trajectory(
        presets.get("fedavg")
    )
    assert trajectory(presets.get("fedavgm", momentum=0.0)) == trajectory(presets.get("fedavg"))


@pytest.mark.parametrize("name", sorted(presets.OPTIONS))
def test_frozen_tensors_stay_the_same_bits_and_given_params_are_not_written_into(name: str) -> None:
    strategy = presets.get(name)
    params: Params = {"w": np.array([1.0], np.float32), "frozen": np.array([np.pi], np.float32)}
    before = {key: value.copy() for key, value in params.items()}
    for value in params.values():
        value.setflags(write=False)
    step = {"w": np.array([0.5])}
    update = Update(step, 1, 1, 0.0, {"chosen": {"model": np.zeros(1, np.float32)}})
    heard = CohortAggregate(step, {"control": step}, 1, 1, 0.0, updates=[update])
    moved, state = strategy.apply(params, strategy.init(params, ["w"]), heard, num_clients=2)
    assert all((params[key] == value).all() for key, value in before.items())
    assert moved["w"] != params["w"] and moved["w"].dtype == np.float32
    assert moved["frozen"].tobytes() == params["frozen"].tobytes()
    assert not [key for key in state.arrays if key.endswith("/frozen")]
