"""The downlink's delta coding: receivers hold what the server thinks they hold, and come close to its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.records import Held
from strategies.codes import known
from strategies.codes.broadcast import add, advance
from strategies.codes.code import Code
from strategies.params import Params

CODES: list[dict[str, Any]] = [
    {"name": "topk", "share": 0.1},
    {"name": "topk", "share": 0.1, "bits": 1},
    {"name": "qsgd", "bits": 4},
    {"name": "sign"},
    {"name": "drive"},
    {"name": "eden", "bits": 2},
    {"name": "powersgd", "rank": 2},
]
EACH = pytest.mark.parametrize(
    "code", [known.from_options(each) for each in CODES], ids=lambda code: code.name
)
SHAPES = {"bias": (7,), "fc": (20, 15), "frozen": (3,)}
TRAINED = ("bias", "fc")


def model(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {**params, "frozen": np.ones(3, np.float32)}


def distance(first: Params, second: Params) -> float:
    return float(sum(np.square(first[name] - second[name], dtype=np.float64).sum() for name in TRAINED))


def moved(code: Code, held: Params, params: Params, number: int) -> tuple[Params, bytes]:
    after = advance(code, held, params, TRAINED, np.random.default_rng(number))
    assert after is not None
    return after


@EACH
@given(seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_a_receiver_of_all_messages_holds_the_same_bits_as_the_server(code: Code, seed: int) -> None:
    held = model(seed)
    receiver = {name: held[name] for name in TRAINED}
    for number in range(1, 4):
        held, message = moved(code, held, model(seed + number), number)
        receiver = add(code, message, receiver)
        assert set(held) == set(SHAPES)
        assert all(np.array_equal(receiver[name], held[name]) for name in TRAINED)


@EACH
@given(seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_receivers_come_closer_to_a_model_that_stands_still(code: Code, seed: int) -> None:
    """What a message leaves out is in the next one."""
    held, target = model(seed), model(seed + 1)
    first = distance(held, target)
    for number in range(30):
        held, _ = moved(code, held, target, number)
    assert distance(held, target) < 0.3 * first


def test_numbers_that_overflow_are_not_written() -> None:
    low = {name: np.full(shape, -3e38, np.float32) for name, shape in SHAPES.items()}
    high = {name: -value for name, value in low.items()}
    assert advance(known.get("drive"), low, high, TRAINED, np.random.default_rng(0)) is None


def test_a_client_lacks_the_messages_since_its_version() -> None:
    held = Held({}, first=3, sizes=(10, 20, 40), versions={"current": 6, "late": 4, "first": 3, "older": 2})
    missing = {client: held.missing_bytes(client) for client in (*held.versions, "new")}
    assert missing == {"current": 0, "late": 60, "first": 70, "older": None, "new": None}
