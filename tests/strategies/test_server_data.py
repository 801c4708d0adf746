"""Strategies whose server has data of its own: FLTrust against a naive twin and by its laws, and what FedDF folds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies import presets
from strategies.algorithms.server_data import feddf, fltrust
from strategies.algorithms.server_data.server import RUN_MODEL, Answers, Distillation, with_server
from strategies.params import Params, Tensors, elementwise, materialize
from strategies.relays import CannotRelay, add_relays
from strategies.slices import shapes_of
from strategies.strategy import Strategy
from strategies.update import Update

Rows = np.ndarray


def updates_of(rows: Rows, examples: int = 1) -> list[Update]:
    return [Update(tensors(row), examples, 1, 0.0) for row in np.asarray(rows, np.float32)]


def tensors(row: Rows) -> Params:
    """A row as two tensors."""
    return {"b": row[-1:], "a": row[:-1].reshape(1, -1)}


def trusted(rows: Rows, reference: Rows) -> Rows:
    delta = fltrust.aggregate(updates_of(rows), tensors(np.asarray(reference, np.float32)))
    return np.concatenate([np.ravel(delta["a"]), np.ravel(delta["b"])])


def naive(rows: Sequence[Sequence[float]], reference: Sequence[float]) -> list[float]:
    """Algorithm 2 of the paper, lines 8 to 12, in plain Python."""

    def dot(one: Sequence[float], other: Sequence[float]) -> float:
        return math.fsum(a * b for a, b in zip(one, other, strict=True))

    length = math.sqrt(dot(reference, reference))
    total, result = 0.0, [0.0] * len(reference)
    for row in rows:
        own = math.sqrt(dot(row, row))
        if not own or not length:
            continue
        score = max(0.0, dot(row, reference) / own / length)
        total += score
        result = [r + score * length / own * value for r, value in zip(result, row, strict=True)]
    return [value / total for value in result] if total else result


numbers = st.floats(-8, 8, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-3)
cohorts = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(2, 7)), elements=numbers)


def direction(seed: int, values: int) -> Rows:
    """The delta of the server's own rows."""
    return np.random.default_rng([seed, 1]).normal(size=(values,)).astype(np.float32)


@given(cohorts, st.integers(0, 2**16))
def test_fltrust_is_algorithm_2_of_its_paper(rows: Rows, seed: int) -> None:
    reference = direction(seed, rows.shape[1])
    expected = naive(rows.astype(float).tolist(), reference.astype(float).tolist())
    # Scores near 0 are differences of large products; their sum divides the result.
    np.testing.assert_allclose(trusted(rows, reference), expected, rtol=1e-6, atol=1e-9)


@given(cohorts, st.integers(0, 2**16))
def test_the_length_of_an_update_counts_for_nothing(rows: Rows, seed: int) -> None:
    rng = np.random.default_rng(seed)
    reference = direction(seed, rows.shape[1])
    longer = rows * 2.0 ** rng.integers(-3, 9, size=(len(rows), 1))
    np.testing.assert_allclose(trusted(longer, reference), trusted(rows, reference), rtol=1e-6, atol=1e-9)


@given(cohorts, st.integers(0, 2**16))
def test_no_aggregate_is_longer_than_the_servers_own_update(rows: Rows, seed: int) -> None:
    reference = direction(seed, rows.shape[1])
    length = float(np.linalg.norm(reference.astype(np.float64)))
    assert np.linalg.norm(trusted(rows, reference)) <= length * (1 + 1e-9)


def test_updates_that_point_the_other_way_are_ignored() -> None:
    reference = np.array([1.0, 2.0, -1.0])
    good = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, -1.0]])
    bad = -100 * good
    np.testing.assert_allclose(trusted(np.concatenate([good, bad]), reference), trusted(good, reference))


def test_without_a_trusted_update_the_model_stays() -> None:
    assert not trusted(-np.ones((3, 4)), np.ones(4)).any()
    assert not trusted(np.zeros((2, 4)), np.ones(4)).any()
    assert not trusted(np.ones((2, 4)), np.zeros(4)).any()


def test_examples_that_a_client_claims_do_not_weigh() -> None:
    rows = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    reference = tensors(np.ones(5, np.float32))
    few, many = (updates_of(rows[:2], examples=1) + updates_of(rows[2:], examples=n) for n in (1, 10**6))
    one, other = (materialize(fltrust.aggregate(cohort, reference))["a"] for cohort in (few, many))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["feddf", "fltrust"])
def test_relays_pass_no_single_updates_on(name: str) -> None:
    with pytest.raises(CannotRelay, match="of single updates, and relays do not pass them on"):
        add_relays(presets.get(name), 2)


# -- FedDF --


@dataclass
class Recorded:
    """A server that answers with the first value of a model, and whose models learn nothing but `learnt`."""

    learnt: float = 0.0
    answers: Sequence[Answers] | None = None
    asked: list[tuple[str, Tensors]] = field(default_factory=list)
    taught: list[tuple[Mapping[str, Tensors], Answers, Distillation]] = field(default_factory=list)

    def train(self) -> Tensors:
        raise AssertionError("FedDF trains on no labels")

    def answer(self, models: Sequence[tuple[str, Tensors]]) -> Sequence[Answers]:
        self.asked += models
        return self.answers or [np.full((3, 2), delta["w"].flat[0], np.float32) for _, delta in models]

    def distil(
        self, starts: Mapping[str, Tensors], answers: Answers, how: Distillation
    ) -> Mapping[str, Tensors]:
        self.taught.append((starts, answers, how))
        return {name: elementwise(lambda value: value + self.learnt, start) for name, start in starts.items()}


OWN, OTHER = {"w": np.zeros((2, 2), np.float32)}, {"w": np.zeros(3, np.float32)}


def with_classes(server: Recorded, **options: object) -> Strategy:
    shapes = {RUN_MODEL: shapes_of(OWN), "small": shapes_of(OTHER)}
    equipped = with_server(presets.get("feddf", **options), server, shapes=shapes)
    return replace(equipped, class_models={"small": OTHER})


def update(like: Params, value: float, examples: int = 1) -> Update:
    return Update({name: np.full_like(each, value) for name, each in like.items()}, examples, 1, value)


def test_each_class_is_averaged_alone_and_learns_from_all() -> None:
    server = Recorded(learnt=10.0)
    strategy = with_classes(server, distil_epochs=3, distil_lr=0.5)
    state = strategy.init(OWN, ["w"])
    fold = strategy.start(4)
    for position, each in enumerate(
        [update(OWN, 1.0, 3), update(OTHER, 4.0), update(OWN, 5.0, 1), update(OTHER, 8.0)]
    ):
        fold.add(position, each)
    aggregate = fold.finish()
    assert [name for name, _ in server.asked] == [RUN_MODEL, "small", RUN_MODEL, "small"]
    ((starts, answers, how),) = server.taught
    np.testing.assert_array_equal(answers, np.full((3, 2), np.mean([1, 4, 5, 8])))
    assert (how.epochs, how.lr) == (3, 0.5)
    assert [materialize(starts[name])["w"].flat[0] for name in (RUN_MODEL, "small")] == [2.0, 6.0]
    params, after = strategy.apply(OWN, state, aggregate, 4)
    np.testing.assert_array_equal(params["w"], np.full((2, 2), 12.0))
    np.testing.assert_array_equal(strategy.models(after)["small"]["w"], np.full(3, 16.0))
    assert (aggregate.num_updates, aggregate.num_examples) == (4, 6)


def test_a_class_of_which_nobody_answered_learns_from_where_it_was() -> None:
    server = Recorded()
    strategy = with_classes(server)
    fold = strategy.start(2)
    fold.add(1, update(OTHER, 4.0))
    aggregate = fold.finish()
    assert server.taught[0][0][RUN_MODEL] == {}
    params, after = strategy.apply(OWN, strategy.init(OWN, ["w"]), aggregate, 2)
    np.testing.assert_array_equal(params["w"], OWN["w"])
    np.testing.assert_array_equal(strategy.models(after)["small"]["w"], np.full(3, 4.0))


def test_models_whose_answers_are_not_finite_teach_nobody() -> None:
    good, bad = np.ones((3, 2), np.float32), np.full((3, 2), np.inf, np.float32)
    assert np.array_equal(feddf.mean_answers([good, bad, 3 * good]), 2 * good)  # type: ignore[arg-type]
    assert feddf.mean_answers([bad]) is None
    server = Recorded(learnt=10.0, answers=[bad])
    fold = with_classes(server).start(1)
    fold.add(0, update(OWN, 1.0))
    assert materialize(fold.finish().delta)["w"].flat[0] == 1.0  # not distilled
    assert not server.taught


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 12), st.just(4)), elements=st.floats(-8, 8, width=32)))
def test_with_one_model_and_nothing_learnt_it_is_fedavg_to_the_bit(rows: Rows) -> None:
    cohort = [Update(tensors(row), index + 1, 1, 0.5) for index, row in enumerate(rows)]
    params = tensors(np.arange(4, dtype=np.float32))
    results = []
    server = Recorded(answers=[np.zeros((1, 2), np.float32)] * len(rows))
    for strategy in (presets.get("fedavg"), with_server(presets.get("feddf"), server)):
        fold = strategy.start(len(cohort))
        for position, each in enumerate(cohort):
            fold.add(position, each)
        moved, _ = strategy.apply(params, strategy.init(params, list(params)), fold.finish(), len(cohort))
        results.append(materialize(moved))
    for name in params:
        np.testing.assert_array_equal(results[0][name], results[1][name])
