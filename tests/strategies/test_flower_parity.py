"""Our server optimizers against Flower's classes, over several rounds of random updates.

Flower computes in the dtype of the replies. It is given float64, so what is left of the difference is our own
float32 params and state: 6e-8 relative a round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.serverapp import strategy as flower

from strategies import presets
from strategies.strategy import Strategy
from strategies.update import Update
from tests.support.flower import Tensors, params_after_each_round

ROUNDS = 6
SHAPES = {"conv.weight": (4, 2, 3, 3), "fc.weight": (5, 7), "fc.bias": (5,)}
NUM_EXAMPLES = [1, 10, 25, 3, 7, 40, 12, 9, 30, 2, 5]
RATES = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.95, "tau": 1e-2}

ALL_NODES: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": len(NUM_EXAMPLES)}

CASES = {
    "fedavg": (presets.get("fedavg"), flower.FedAvg(**ALL_NODES)),
    "fedavgm": (
        presets.get("fedavgm", server_lr=0.7, momentum=0.9),
        flower.FedAvgM(**ALL_NODES, server_learning_rate=0.7, server_momentum=0.9),
    ),
    "fedavgm without momentum": (
        presets.get("fedavgm", server_lr=0.5, momentum=0.0),
        flower.FedAvgM(**ALL_NODES, server_learning_rate=0.5, server_momentum=0.0),
    ),
    "fedadam": (
        presets.get("fedadam", **RATES, flower_form=True),
        flower.FedAdam(**ALL_NODES, eta=0.1, beta_1=0.8, beta_2=0.95, tau=1e-2),
    ),
    "fedyogi": (
        presets.get("fedyogi", **RATES, flower_form=True),
        flower.FedYogi(**ALL_NODES, eta=0.1, beta_1=0.8, beta_2=0.95, tau=1e-2),
    ),
    "fedadagrad": (
        presets.get("fedadagrad", server_lr=0.1, tau=1e-2, flower_form=True),
        flower.FedAdagrad(**ALL_NODES, eta=0.1, tau=1e-2),
    ),
}


def tensors(rng: np.random.Generator, scale: float) -> Tensors:
    return {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("ours", "theirs"), CASES.values(), ids=CASES.keys())
def test_every_round_equals_flowers(ours: Strategy, theirs: flower.Strategy) -> None:
    rng = np.random.default_rng(11)
    initial = tensors(rng, 1.0)
    deltas = [[tensors(rng, 0.1) for _ in NUM_EXAMPLES] for _ in range(ROUNDS)]

    def client(position: int):
        def train(server_round: int, received: Tensors) -> tuple[Tensors, int]:
            delta = deltas[server_round - 1][position]
            return {name: value + delta[name] for name, value in received.items()}, NUM_EXAMPLES[position]

        return train

    start = {name: value.astype(np.float64) for name, value in initial.items()}
    clients = [client(position) for position in range(len(NUM_EXAMPLES))]
    expected = params_after_each_round(theirs, start, clients, ROUNDS)

    params, state = initial, ours.init(initial, list(initial))
    for number in range(ROUNDS):
        fold = ours.start(len(NUM_EXAMPLES))
        for position, num_examples in enumerate(NUM_EXAMPLES):
            fold.add(position, ours.transform(Update(deltas[number][position], num_examples, 1, 0.0)))
        params, state = ours.apply(params, state, fold.finish(), num_clients=len(NUM_EXAMPLES))
        for name, value in expected[number].items():
            assert value.dtype == np.float64
            np.testing.assert_allclose(
                params[name], value, rtol=1e-6, atol=1e-6, err_msg=f"round {number + 1}, {name}"
            )

    assert max(np.abs(params[name] - initial[name]).max() for name in initial) > 0.05


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_flowers_form_differs_from_the_papers(name: str) -> None:
    initial = tensors(np.random.default_rng(1), 1.0)
    update = Update(tensors(np.random.default_rng(2), 0.1), 1, 1, 0.0)
    moved = []
    for flower_form in (False, True):
        strategy = presets.get(name, tau=1e-2, flower_form=flower_form)
        fold = strategy.start(1)
        fold.add(0, update)
        moved.append(strategy.apply(initial, strategy.init(initial, list(initial)), fold.finish(), 1)[0])
    assert max(np.abs(moved[0][tensor] - moved[1][tensor]).max() for tensor in initial) > 1e-6
