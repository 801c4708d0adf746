"""FedNova with momentum on the clients, against the paper's equations written out over single gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import presets
from strategies.algorithms.fednova import gradient_weight
from strategies.update import Update

RHO, LR = 0.8, 0.05
CLIENTS = [(3, 1), (20, 7), (5, 30)]
"""Examples and steps of each."""


def local_run(steps: int, seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """What `torch.optim.SGD` moves over random gradients, and these."""
    rng = np.random.default_rng(seed)
    weight = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=RHO)
    gradients = [rng.normal(1, 1, 4) for _ in range(steps)]
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    return weight.detach().numpy(), gradients


def weights_of_gradients(steps: int) -> np.ndarray:
    """The vector a: how often each gradient was added to the velocity of this step or a later one, faded by ρ."""
    return np.array([sum(RHO**later for later in range(steps - step)) for step in range(steps)])


def test_the_round_is_the_papers_with_momentum_on_the_clients() -> None:
    runs = [local_run(steps, seed) for seed, (_, steps) in enumerate(CLIENTS)]
    share = np.array([examples for examples, _ in CLIENTS], float)
    share /= share.sum()
    normalized, norms = [], []
    for (moved, gradients), (_, steps) in zip(runs, CLIENTS, strict=True):
        a = weights_of_gradients(steps)
        np.testing.assert_allclose(moved, -LR * (a @ np.array(gradients)))  # a is what SGD does
        normalized.append(a @ np.array(gradients) / a.sum())
        norms.append(a.sum())
    tau = float(share @ norms)
    expected = -tau * LR * (share @ np.array(normalized))

    strategy = presets.get("fednova", local_momentum=RHO)
    params = {"w": np.zeros(4, np.float32)}
    fold = strategy.start(len(CLIENTS))
    for position, ((moved, _), (examples, steps)) in enumerate(zip(runs, CLIENTS, strict=True)):
        fold.add(position, Update({"w": moved.astype(np.float32)}, examples, steps, 0.0))
    after, _ = strategy.apply(params, strategy.init(params, ["w"]), fold.finish(), num_clients=3)
    np.testing.assert_allclose(after["w"], expected, rtol=0, atol=1e-6)


@given(steps=st.integers(1, 200), momentum=st.floats(0, 0.99))
def test_gradients_count_for_what_their_powers_of_momentum_add_up_to(steps: int, momentum: float) -> None:
    summed = sum((1 - momentum**step) / (1 - momentum) for step in range(1, steps + 1))
    assert gradient_weight(steps, momentum) == pytest.approx(summed, rel=1e-9)


def test_without_momentum_a_client_counts_for_its_steps() -> None:
    assert [gradient_weight(steps, 0.0) for steps in (1, 2, 50)] == [1, 2, 50]
