"""Tasks and results on the wire: what goes in comes out, and what a client says is believed in no detail."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.train.trainer import TrainTask
from edge_client.wire import arrays
from edge_client.wire.arrays import LARGEST_COUNT, Malformed, ResultHeader
from edge_client.wire.device import TaskMessage
from strategies import client_rules
from strategies.client_rules import ControlVariates, DynamicRegularizer, PlainSGD, Proximal
from strategies.personalisation import LocalTensors
from strategies.update import Update

TASK = TaskMessage(
    round=3, client="site-a", base="ab" * 32, seed=5, batch_size=16, lr=0.05, epochs=2, steps=None,
    rule={"name": "plain"},
)  # fmt: skip
HONEST = {"round": 3, "client": "a", "base": "ab", "num_examples": 4, "num_steps": 2, "train_loss": 0.5}

tasks = st.builds(
    TaskMessage,
    round=st.integers(1, 10_000),
    client=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    base=st.text("0123456789abcdef", min_size=64, max_size=64),
    seed=st.integers(0, 2**63 - 1),
    batch_size=st.integers(1, 65_536),
    lr=st.floats(1e-9, 1e3),
    epochs=st.none() | st.integers(1, 100),
    steps=st.none() | st.integers(1, 100),
    rule=st.sampled_from(
        [
            client_rules.to_options(rule)
            for rule in (
                PlainSGD(),
                Proximal(0.01),
                ControlVariates(),
                DynamicRegularizer(0.1),
                LocalTensors(("fc.*",)),
            )
        ]
    ),
).filter(lambda task: (task.epochs is None) != (task.steps is None))


@given(tasks)
def test_a_task_comes_back_from_json_as_it_was(task: TaskMessage) -> None:
    assert TaskMessage.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_a_task_is_trained_as_it_says() -> None:
    broadcast = {"control": {"w": np.ones(2, np.float32)}}
    task = TrainTask.of(TaskMessage(**{**asdict(TASK), "rule": {"name": "proximal", "mu": 0.1}}), broadcast)
    assert (task.seed, task.batch_size, task.lr, task.epochs, task.steps) == (5, 16, 0.05, 2, None)
    assert task.rule == Proximal(0.1)
    assert task.broadcast is broadcast


def test_a_result_carries_the_update_and_what_it_answers() -> None:
    delta, control = np.array([1.5, -2.0], np.float32), np.array([[3.0]], np.float32)
    update = Update({"fc.w": delta}, 40, 6, 0.25, {"control": {"fc.w": control}})
    payload = arrays.encode_result(TASK, update)
    tensors = arrays.decode(payload)
    assert sorted(tensors) == ["control/fc.w", "delta/fc.w"]
    assert tensors["delta/fc.w"].tobytes() == delta.tobytes()
    assert tensors["control/fc.w"].tobytes() == control.tobytes()
    header = arrays.result_header(arrays.read_header(payload).values)
    assert header == ResultHeader(3, "site-a", "ab" * 32, 40, 6, 0.25)
    assert arrays.encode_result(TASK, update) == payload


def test_a_loss_may_be_not_a_number_for_the_intake_to_judge() -> None:
    update = Update({"w": np.zeros(1, np.float32)}, 1, 1, float("nan"))
    values = arrays.read_header(arrays.encode_result(TASK, update)).values
    assert np.isnan(arrays.result_header(values).train_loss)


def test_a_whole_number_is_a_loss_too() -> None:
    loss = arrays.result_header({**HONEST, "train_loss": 1}).train_loss
    assert (loss, type(loss)) == (1.0, float)


def test_keys_of_a_newer_client_are_left_alone() -> None:
    assert arrays.result_header({**HONEST, "battery": 0.5}) == arrays.result_header(HONEST)


ODD: tuple[Any, ...] = (None, True, [], {}, "1", 1.5, 10**400, -(10**400))
WRONG = [
    (key, value)
    for key, honest in HONEST.items()
    for value in ODD
    if type(value) is not type(honest) or isinstance(value, int)
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda part: str(part)[:12])
def test_a_value_of_another_kind_is_malformed_and_named(key: str, value: Any) -> None:
    with pytest.raises(Malformed) as caught:
        arrays.result_header({**HONEST, key: value})
    assert str(caught.value).startswith(f"result header: {key} is ")
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("key", HONEST)
def test_a_missing_key_is_malformed_and_named(key: str) -> None:
    with pytest.raises(Malformed, match=f"{key} is None"):
        arrays.result_header({other: value for other, value in HONEST.items() if other != key})


@pytest.mark.parametrize("key", ["round", "num_examples", "num_steps"])
def test_counts_stay_within_what_float64_holds_exactly(key: str) -> None:
    assert getattr(arrays.result_header({**HONEST, key: LARGEST_COUNT}), key) == LARGEST_COUNT
    with pytest.raises(Malformed, match=f"{key} is 9007199254740993, expected at most"):
        arrays.result_header({**HONEST, key: LARGEST_COUNT + 1})


@given(st.dictionaries(st.sampled_from(list(HONEST)), st.none() | st.integers() | st.floats() | st.text()))
def test_arbitrary_values_are_malformed_or_a_header(values: dict[str, Any]) -> None:
    try:
        header = arrays.result_header({**HONEST, **values})
    except Malformed:
        return
    assert asdict(header).keys() == HONEST.keys()
    float(header.num_examples) * header.train_loss  # arithmetic takes them
