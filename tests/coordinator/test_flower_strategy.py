"""Fedloop's strategies in a Flower `ServerApp`: the model of each round is that of our own loop; what cannot be is refused."""

from __future__ import annotations

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from strategies import presets
from strategies.params import difference
from strategies.update import Update
from tests.support.flower import Client, Tensors, params_after_each_round

SHAPES = {"conv.weight": (4, 2, 3, 3), "fc.weight": (5, 7), "fc.bias": (5,)}
EXAMPLES = [1, 10, 25, 3, 7, 40, 12]
ROUNDS = 3


def tensors(seed: int, scale: float) -> Tensors:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in SHAPES.items()}


def clients(*broken: int) -> list[Client]:
    """Each adds values of its own and of the round; those in `broken` send NaN."""

    def client(number: int) -> Client:
        def train(server_round: int, received: Tensors) -> tuple[Tensors, int]:
            moves = tensors(100 * number + server_round, 0.1)
            trained = {name: value + moves[name] for name, value in received.items() if name in moves}
            if number in broken:
                trained["fc.bias"][0] = np.nan
            return {**received, **trained}, EXAMPLES[number]

        return train

    return [client(number) for number in range(len(EXAMPLES))]


def expected(name: str, options: dict[str, object], left_out: tuple[int, ...] = ()) -> list[Tensors]:
    """The params after each round of our own loop."""
    strategy, params = presets.get(name, **options), tensors(1, 1.0)
    state, seen = strategy.init(params, list(params)), []
    for number in range(1, ROUNDS + 1):
        answers = [each(number, params) for at, each in enumerate(clients()) if at not in left_out]
        fold = strategy.start(len(answers))
        for position, (trained, examples) in enumerate(answers):
            fold.add(position, strategy.transform(Update(difference(trained, params), examples, 1, 0.0)))
        moved, state = strategy.apply(params, state, fold.finish(), len(EXAMPLES))
        params = {key: np.asarray(value) for key, value in moved.items()}
        seen.append(params)
    return seen


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"server_lr": 0.5}),
        ("fedyogi", {"server_lr": 0.1}),
        ("multi_krum", {"malicious": 2, "mix_neighbours": True}),
        ("median", {"malicious": 3, "momentum": 0.5}),
        ("bulyan", {}),
    ],
)
def test_each_round_in_flower_is_that_of_our_own_loop(name: str, options: dict[str, object]) -> None:
    theirs = fedloop.flower_strategy(name, options, fraction_evaluate=0.0)
    found = params_after_each_round(theirs, tensors(1, 1.0), clients(), ROUNDS)
    for ours, flowers in zip(expected(name, options), found, strict=True):
        for key, value in ours.items():
            np.testing.assert_array_equal(flowers[key], value, err_msg=key)


def test_an_update_with_nan_is_left_out_and_other_arrays_stay() -> None:
    initial = {**tensors(1, 1.0), "seen": np.array([3], np.int64), "half": np.ones(2, np.float16)}
    theirs = fedloop.flower_strategy("fedavg", fraction_evaluate=0.0)
    found = params_after_each_round(theirs, initial, clients(2, 4), ROUNDS)[-1]
    for key, value in expected("fedavg", {}, left_out=(2, 4))[-1].items():
        np.testing.assert_array_equal(found[key], value)
    assert (found["seen"].dtype, found["seen"].tolist()) == (np.int64, [3])
    assert (found["half"].dtype, found["half"].tolist()) == (np.float16, [1, 1])


def test_a_round_with_too_few_updates_leaves_the_model() -> None:
    theirs = fedloop.flower_strategy("median", {"malicious": 3}, fraction_evaluate=0.0)
    found = params_after_each_round(theirs, tensors(1, 1.0), clients(0), ROUNDS)
    assert all(np.array_equal(value, found[-1][key]) for key, value in tensors(1, 1.0).items())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "scaffold",
            {},
            "changes the steps of clients, which a ClientApp takes by itself; take one of fedavg",
        ),
        ("feddyn", {}, "changes the steps of clients"),
        ("fedbuff", {}, "is asynchronous"),
        ("krumm", {}, "did you mean 'krum'"),
        ("krum", {"malicious": -1}, "expected a whole number >= 0"),
    ],
)
def test_what_a_flower_app_cannot_have_is_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fedloop.flower_strategy(name, options)


def test_fednova_asks_for_the_steps_of_each_client() -> None:
    theirs = fedloop.flower_strategy("fednova", fraction_evaluate=0.0)
    with pytest.raises(UserError, match="put 'num-steps' into the MetricRecord"):
        params_after_each_round(theirs, tensors(1, 1.0), clients(), 1)
