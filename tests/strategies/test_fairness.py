"""q-FedAvg against a naive twin of Algorithm 2, and what it is for: clients that end with losses more alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from models.zoo import logreg
from strategies import presets
from strategies.params import Params
from strategies.strategy import Strategy
from strategies.update import Update
from tests.support.local_data import examples, first_params, torch_runtime

PARAMS: Params = {
    "b": np.array([0.5], np.float32),
    "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
}
NUMBERS = st.floats(-2, 2, width=32)


@st.composite
def cohorts(draw: st.DrawFn) -> list[Update]:
    found = []
    for _ in range(draw(st.integers(1, 12))):
        values = np.array(draw(st.lists(NUMBERS, min_size=7, max_size=7)), np.float32)
        loss = np.array([draw(st.floats(0.015625, 8, width=32))], np.float32)
        delta = {"b": values[:1], "w": values[1:].reshape(2, 3)}
        found.append(Update(delta, draw(st.integers(1, 50)), 3, 1.0, {"received": {"loss": loss}}))
    return found


def after(strategy: Strategy, updates: list[Update]) -> Params:
    fold = strategy.start(len(updates))
    for position, update in enumerate(updates):
        fold.add(position, update)
    moved, _ = strategy.apply(PARAMS, strategy.init(PARAMS, PARAMS), fold.finish(), len(updates))
    return {name: moved[name] for name in moved}


def algorithm_2(updates: list[Update], q: float, lipschitz: float) -> np.ndarray:
    """The new params, flat, by the formulas of the paper."""
    w = np.concatenate([PARAMS[name].ravel() for name in sorted(PARAMS)]).astype(np.float64)
    numerator, denominator = np.zeros_like(w), 0.0
    for update in updates:
        own = w + np.concatenate([update.delta[name].ravel() for name in sorted(PARAMS)])
        loss = float(update.extras["received"]["loss"][0]) + 1e-10
        gradient = lipschitz * (w - own)
        numerator += loss**q * gradient
        denominator += q * loss ** (q - 1) * float(gradient @ gradient) + lipschitz * loss**q
    return w - numerator / denominator


@given(cohorts(), st.floats(0, 5), st.floats(0.1, 100))
def test_the_fair_mean_is_that_of_algorithm_2(updates: list[Update], q: float, lipschitz: float) -> None:
    moved = after(presets.get("qfedavg", q=q, lipschitz=lipschitz), updates)

    found = np.concatenate([moved[name].ravel() for name in sorted(PARAMS)])
    np.testing.assert_allclose(found, algorithm_2(updates, q, lipschitz), rtol=1e-6, atol=1e-6)


@given(cohorts(), st.floats(0.1, 100))
def test_with_q_of_0_it_is_fedavg(updates: list[Update], lipschitz: float) -> None:
    fair = after(presets.get("qfedavg", q=0, lipschitz=lipschitz), updates)
    mean = after(presets.get("fedavg", weighting="uniform"), updates)
    for name, value in mean.items():
        np.testing.assert_allclose(fair[name], value, rtol=1e-6, atol=1e-7)


def test_a_client_sends_the_loss_of_the_model_that_it_received() -> None:
    spec = logreg.spec((12,), 3)
    data, params = examples(spec.input_shape, 3, 40, seed=1, padded=2), first_params(spec)
    rule = presets.get("qfedavg").client_rule
    trainer = Trainer(torch_runtime(spec))

    update = trainer.train(params, TrainTask(0, 8, 0.1, epochs=3, rule=rule), data).update

    assert update.extras["received"]["loss"] == pytest.approx(trainer.evaluate(params, data).loss, rel=1e-6)
    assert update.train_loss < update.extras["received"]["loss"][0]


def test_clients_end_with_losses_more_alike() -> None:
    """Seven clients whose labels follow one rule, and one whose labels follow its opposite."""
    spec = logreg.spec((12,), 2)
    rng = np.random.default_rng(4)
    separator = rng.standard_normal(12)
    clients = []
    for sign in (1, 1, 1, 1, 1, 1, 1, -1):
        x = rng.standard_normal((40, 12)).astype(np.float32)
        clients.append(Examples(x, (sign * (x @ separator) > 0).astype(np.int32)))

    def losses(strategy: Strategy) -> list[float]:
        trainer, params = Trainer(torch_runtime(spec)), first_params(spec)
        state = strategy.init(params, params)
        for number in range(20):
            task = TrainTask(number, 20, 0.1, epochs=1, rule=strategy.client_rule)
            fold = strategy.start(len(clients))
            for position, rows in enumerate(clients):
                fold.add(position, trainer.train(params, task, rows).update)
            moved, state = strategy.apply(params, state, fold.finish(), len(clients))
            params = {name: moved[name] for name in moved}
        return [trainer.evaluate(params, rows).loss for rows in clients]

    spreads = [np.var(losses(presets.get("qfedavg", q=q, lipschitz=10.0))) for q in (0, 1, 5)]
    assert spreads[0] > 2 * spreads[1] > 2 * spreads[2]
