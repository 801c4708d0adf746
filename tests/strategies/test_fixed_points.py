"""Where FedAvg, FedProx, SCAFFOLD, FedNova and FedDyn come to rest on two parabolas, against their closed forms.

Client i has the loss aᵢ/2 · (w − cᵢ)² with a = (1, 4), c = (0, 1); the mean loss has its minimum at 0.8.
With K local steps of rate lr a client moves the fraction pᵢ = 1 − (1 − lr · aᵢ)^K of its way to cᵢ, so
FedAvg rests at Σ pᵢcᵢ / Σ pᵢ. With the proximal term solved exactly pᵢ = aᵢ / (aᵢ + mu).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from strategies import presets
from strategies.params import Params
from strategies.strategy import Strategy
from tests.support.quadratic import QuadraticRuntime

CLIENTS = [Trainer(QuadraticRuntime(a=1.0, c=0.0)), Trainer(QuadraticRuntime(a=4.0, c=1.0))]
NO_MATTER = Examples(np.zeros((1, 1), np.float32), np.zeros(1, np.int32))
OPTIMUM = 0.8

FLOAT32_HALF_STEP = 2.0**-25
"""Largest rounding error of a float32 in [0.5, 1)."""


def rest(
    strategy: Strategy,
    steps: int | Sequence[int],
    rounds: int,
    clients: Sequence[Trainer] = CLIENTS,
    lr: float = 0.1,
) -> float:
    """The param after `rounds` rounds of both clients, from 5. `steps`: of both, or of each."""
    counts = [steps, steps] if isinstance(steps, int) else steps
    params: Params = {"w": np.array([5.0], np.float32)}
    state = strategy.init(params, ["w"])
    kept: list[dict[str, Params]] = [{}, {}]
    for number in range(rounds):
        task = TrainTask(
            seed=number,
            batch_size=1,
            lr=lr,
            rule=strategy.client_rule,
            broadcast=strategy.broadcast(state),
        )
        fold = strategy.start(len(clients))
        for position, client in enumerate(clients):
            own = replace(task, steps=counts[position])
            result = client.train(params, own, NO_MATTER, kept[position])
            kept[position] = result.client_state
            fold.add(position, strategy.transform(result.update))
        params, state = strategy.apply(params, state, fold.finish(), num_clients=len(clients))
    return float(params["w"][0])


def test_fedavg_rests_beside_the_optimum() -> None:
    moved = 1 - (1 - 0.1 * np.array([1.0, 4.0])) ** 10
    expected = float((moved * [0.0, 1.0]).sum() / moved.sum())
    assert expected == pytest.approx(0.6041260, abs=5e-8)
    assert rest(presets.get("fedavg"), steps=10, rounds=100) == pytest.approx(expected, abs=1e-6)


def test_fedprox_with_its_local_problem_solved_rests_closer_to_the_optimum() -> None:
    fractions = np.array([1.0, 4.0]) / (np.array([1.0, 4.0]) + 1.0)
    expected = float((fractions * [0.0, 1.0]).sum() / fractions.sum())
    assert expected == pytest.approx(0.6153846, abs=5e-8)
    # The slower client closes 0.2 of the gap to its local solution a step: 0.8^100 is 2e-10 of it.
    assert rest(presets.get("fedprox", mu=1.0), steps=100, rounds=100) == pytest.approx(expected, abs=1e-6)


def test_scaffold_rests_at_the_optimum_to_float32_rounding() -> None:
    # In float64 it is exact to 1e-12. Here params, deltas and control variates are float32. At rest the trained
    # params, the new params and both control variates (all in [0.5, 1)) are each off by up to a half step or two;
    # and c keeps for good what was rounded off its changes in the first rounds, when they were near 4 and a half
    # step was four times that. The pull to the optimum is 2.5, so 16 half steps are a bound with room (1.6 seen).
    assert rest(presets.get("scaffold"), steps=10, rounds=300) == pytest.approx(
        OPTIMUM, abs=16 * FLOAT32_HALF_STEP
    )


def test_a_server_at_half_the_rate_rests_at_the_same_point() -> None:
    full = rest(presets.get("fedavg"), steps=10, rounds=100)
    assert rest(presets.get("fedavg", server_lr=0.5), steps=10, rounds=200) == pytest.approx(full, abs=1e-6)


def test_feddyn_rests_at_the_optimum() -> None:
    found = rest(presets.get("feddyn", alpha=1.0), steps=60, rounds=150)
    assert found == pytest.approx(OPTIMUM, abs=1e-5)


def test_fednova_undoes_that_one_client_takes_ten_times_as_many_steps() -> None:
    equal = [Trainer(QuadraticRuntime(a=1.0, c=0.0)), Trainer(QuadraticRuntime(a=1.0, c=1.0))]

    def found(name: str, lr: float, rounds: int) -> float:
        return rest(presets.get(name), (1, 10), rounds, equal, lr)

    assert found("fedavg", 0.1, 100) == pytest.approx(0.86690, abs=1e-5)
    assert found("fednova", 0.1, 100) == pytest.approx(0.39442, abs=1e-5)
    assert found("fednova", 0.001, 2400) == pytest.approx(0.49888, abs=2e-5)
