"""The order of local examples: every epoch sees each one once, and a seed fixes it all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.train import schedule

sizes = st.integers(1, 40)
lengths = st.one_of(
    st.fixed_dictionaries({"epochs": st.integers(1, 5), "steps": st.none()}),
    st.fixed_dictionaries({"epochs": st.none(), "steps": st.integers(1, 60)}),
)


def listed(num_examples: int, batch_size: int, length: dict[str, int | None], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [batch.tolist() for batch in schedule.batches(num_examples, batch_size, **length, rng=rng)]


@given(num_examples=sizes, batch_size=sizes, epochs=st.integers(1, 5), seed=sizes)
def test_every_epoch_is_a_permutation_in_full_batches_but_the_last(
    num_examples: int, batch_size: int, epochs: int, seed: int
) -> None:
    batches = listed(num_examples, batch_size, {"epochs": epochs, "steps": None}, seed)
    in_epoch = -(-num_examples // batch_size)
    assert len(batches) == epochs * in_epoch
    for start in range(0, len(batches), in_epoch):
        epoch = batches[start : start + in_epoch]
        assert sorted(itertools.chain(*epoch)) == list(range(num_examples))
        assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (in_epoch - 1)
        assert len(epoch[-1]) == num_examples - batch_size * (in_epoch - 1)


@given(num_examples=sizes, batch_size=sizes, steps=st.integers(1, 60), seed=sizes)
def test_steps_are_exact_and_the_start_of_as_many_epochs_as_they_need(
    num_examples: int, batch_size: int, steps: int, seed: int
) -> None:
    batches = listed(num_examples, batch_size, {"epochs": None, "steps": steps}, seed)
    assert len(batches) == steps
    assert batches == listed(num_examples, batch_size, {"epochs": steps, "steps": None}, seed)[:steps]


@given(num_examples=sizes, batch_size=sizes, length=lengths, seed=sizes)
def test_count_says_how_many_batches_there_are(
    num_examples: int, batch_size: int, length: dict[str, int | None], seed: int
) -> None:
    assert schedule.count(num_examples, batch_size, **length) == len(
        listed(num_examples, batch_size, length, seed)
    )


@given(num_examples=sizes, batch_size=sizes, length=lengths, seed=sizes)
def test_the_same_seed_gives_the_same_batches(
    num_examples: int, batch_size: int, length: dict[str, int | None], seed: int
) -> None:
    assert listed(num_examples, batch_size, length, seed) == listed(num_examples, batch_size, length, seed)


def test_seeds_and_epochs_differ_in_order() -> None:
    one_epoch = {"epochs": 1, "steps": None}
    assert listed(40, 8, one_epoch, seed=1) != listed(40, 8, one_epoch, seed=2)
    two_epochs = listed(40, 8, {"epochs": 2, "steps": None}, seed=1)
    assert two_epochs[:5] != two_epochs[5:]


@pytest.mark.parametrize("length", [{"epochs": None, "steps": None}, {"epochs": 1, "steps": 1}])
def test_exactly_one_of_epochs_and_steps_must_be_set(length: dict[str, int | None]) -> None:
    with pytest.raises(ValueError, match="exactly one of epochs and steps"):
        listed(4, 2, length, seed=0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 4, {"epochs": None, "steps": 3}), "num_examples"),
        ((4, 0, {"epochs": 1, "steps": None}), "batch_size"),
        ((4, 2, {"epochs": 0, "steps": None}), "epochs or steps"),
        ((4, 2, {"epochs": None, "steps": -1}), "epochs or steps"),
    ],
)
def test_a_schedule_without_a_single_step_is_refused(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} must be at least 1"):
        listed(*arguments, seed=0)
