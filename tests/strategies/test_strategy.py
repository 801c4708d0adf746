"""A strategy's state goes to disk and back, and its streams reach clients."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from strategies import presets
from strategies.client_rules import (
    ControlVariates,
    DynamicRegularizer,
    PlainSGD,
    Proximal,
    to_options,
)
from strategies.own import CohortAggregate
from strategies.params import Params, ShapeMismatch, State, flatten, require_same_shapes, subtree
from strategies.personalisation import HeadThenBody, LocalTensors, PersonalModel, from_options
from strategies.strategy import Strategy
from strategies.update import Aggregate, Update, apply_all

PARAMS: Params = {
    "conv.weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 2, 2),
    "fc.bias": np.array([0.5, -0.25], np.float32),
    "norm.scale": np.array(2.0, np.float32),
    "fc.frozen": np.ones(2, np.float32),
}
TRAINABLE = ["conv.weight", "fc.bias", "norm.scale"]


def aggregate(seed: int) -> Aggregate:
    rng = np.random.default_rng(seed)
    delta, control = (
        {name: np.asarray(rng.normal(0, 0.1, PARAMS[name].shape)) for name in TRAINABLE} for _ in range(2)
    )
    update = Update(delta, 30, 1, 1.0, {"chosen": {"model": np.array([seed % 2], np.float32)}})
    return CohortAggregate(delta, {"control": control}, 3, 30, 1.0, updates=[update])


def through_disk(state: State) -> State:
    arrays, values = safetensors.numpy.save(state.arrays), json.dumps(state.values)
    return State(safetensors.numpy.load(arrays), json.loads(values))


@pytest.mark.parametrize("name", sorted(presets.OPTIONS))
def test_a_run_continued_from_a_saved_state_gives_the_same_bits(name: str) -> None:
    strategy = presets.get(name)
    straight, resumed = (PARAMS, strategy.init(PARAMS, TRAINABLE)), (PARAMS, strategy.init(PARAMS, TRAINABLE))
    for number in range(4):
        straight = strategy.apply(*straight, aggregate(number), num_clients=10)
        resumed = strategy.apply(resumed[0], through_disk(resumed[1]), aggregate(number), num_clients=10)
    for first, second in ((straight[0], resumed[0]), (straight[1].arrays, resumed[1].arrays)):
        assert {n: v.tobytes() for n, v in first.items()} == {n: v.tobytes() for n, v in second.items()}
    assert straight[1].values == resumed[1].values


@pytest.mark.parametrize("name", sorted(presets.OPTIONS))
def test_state_keeps_its_names_and_shapes_from_round_to_round(name: str) -> None:
    strategy = presets.get(name)
    before = strategy.init(PARAMS, TRAINABLE)
    params, after = strategy.apply(PARAMS, before, aggregate(0), num_clients=10)
    require_same_shapes(after.arrays, before.arrays)
    require_same_shapes(params, PARAMS)
    for value in (*after.arrays.values(), *params.values()):
        assert isinstance(value, np.ndarray) and value.dtype == np.float32


def test_scaffold_broadcasts_its_control_variate_and_moves_it_by_the_share_that_took_part() -> None:
    strategy = presets.get("scaffold")
    state = strategy.init(PARAMS, TRAINABLE)
    assert set(strategy.broadcast(state)) == {"control"}
    assert all((value == 0).all() for value in strategy.broadcast(state)["control"].values())

    heard = aggregate(1)
    _, state = strategy.apply(PARAMS, state, heard, num_clients=12)

    control = strategy.broadcast(state)["control"]
    assert set(control) == set(TRAINABLE)
    for name, value in control.items():
        np.testing.assert_allclose(value, 3 / 12 * heard.extras["control"][name], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(set(presets.OPTIONS) - {"scaffold", "qfedavg", "ifca"}))
def test_other_presets_broadcast_nothing_beside_the_params(name: str) -> None:
    strategy = presets.get(name)
    assert strategy.broadcast(strategy.init(PARAMS, TRAINABLE)) == {}


def test_parts_of_a_state_do_not_mix() -> None:
    arrays = flatten({"first": {"w": np.zeros(1), "first/w": np.ones(1)}, "firstly": {"w": np.full(1, 2.0)}})
    assert {name: float(value[0]) for name, value in subtree(arrays, "first").items()} == {
        "w": 0.0,
        "first/w": 1.0,
    }


@pytest.mark.parametrize(
    "rule",
    [
        PlainSGD(),
        Proximal(0.25),
        Proximal(mu=1),
        ControlVariates(),
        DynamicRegularizer(0.5),
        LocalTensors(("fc.*", "*norm*")),
        HeadThenBody(("fc.*",), 3),
        PersonalModel(0.5),
    ],
)
def test_a_client_rule_survives_a_task_message(rule: object) -> None:
    assert from_options(json.loads(json.dumps(to_options(rule)))) == rule


def test_an_unknown_client_rule_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"'normalised' is unknown here; known: plain, proximal, control_variates, dynamic"
    ):
        from_options({"name": "normalised"})


@given(
    own=st.floats(-1, 1, width=32),
    control=st.floats(-1, 1, width=32),
    moved=st.floats(-1, 1, width=32),
    num_steps=st.integers(1, 50),
    lr=st.floats(0.015625, 1.0),
)
def test_a_clients_control_variate_is_option_two_of_the_paper(
    own: float, control: float, moved: float, num_steps: int, lr: float
) -> None:
    def tensor(value: float) -> Params:
        return {"w": np.array([value], np.float32)}

    rule, kept = ControlVariates(), {"control": tensor(own)}
    correction = rule.begin({"control": tensor(control)}, kept)
    update = Update(tensor(moved), num_examples=1, num_steps=num_steps, train_loss=0.0)
    sent, state = apply_all(rule.transforms(correction, lr), update, kept)

    expected = own - control + (0.0 - moved) / (num_steps * lr)
    atol = 4 * 2**-24 * (abs(own) + abs(control) + abs(moved) / (num_steps * lr)) + 1e-30
    assert correction.mu == 0
    np.testing.assert_allclose(correction.offset["w"], control - own, rtol=0, atol=atol)
    np.testing.assert_allclose(state["control"]["w"], expected, rtol=0, atol=atol)
    np.testing.assert_allclose(sent.extras["control"]["w"], expected - own, rtol=0, atol=2 * atol)
    longest = rule.stream_norm(abs(control), abs(moved), num_steps, lr)
    assert abs(float(sent.extras["control"]["w"][0])) <= longest + 2 * atol


def test_the_first_tensor_that_differs_is_named() -> None:
    expected = {"a": np.zeros(2), "b": np.zeros(3)}
    for actual, message in (
        ({"a": np.zeros(2)}, r"tensor 'b' is missing, expected shape \(3,\)"),
        ({**expected, "aa": np.zeros(1)}, r"tensor 'aa' is not one of \['a', 'b'\]"),
        ({"a": np.zeros(4), "b": np.zeros(4)}, r"tensor 'a' is \(4,\), expected \(2,\)"),
    ):
        with pytest.raises(ShapeMismatch, match=message):
            require_same_shapes(actual, expected)
    require_same_shapes(dict(expected), expected)


def test_a_strategy_is_a_value() -> None:
    assert presets.get("fedprox", mu=0.5) == presets.get("fedprox", mu=0.5) != presets.get("fedprox", mu=0.1)
    assert hash(presets.get("fedadam")) == hash(presets.get("fedadam"))
    assert isinstance(presets.get("fedavg"), Strategy)
