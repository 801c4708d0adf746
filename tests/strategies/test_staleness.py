"""What a stale update counts for: Xie 2019, section 5.2."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import staleness
from strategies.update import Update


def test_the_weights_are_those_of_the_paper() -> None:
    """Xie 2019: constant 1; (t - tau + 1)^(-a); 1 up to b, then 1 / (a (t - tau - b) + 1)."""
    assert staleness.parse("constant").weight(1000) == 1.0
    assert staleness.parse("polynomial(0.5)").weight(3) == pytest.approx(1 / np.sqrt(4))
    assert staleness.parse("polynomial(1)").weight(3) == 0.25
    hinge = staleness.parse("hinge(10, 4)")
    assert [hinge.weight(age) for age in (0, 4, 5, 6)] == [
        1.0,
        1.0,
        pytest.approx(1 / 11),
        pytest.approx(1 / 21),
    ]


@given(
    st.sampled_from(["constant", "polynomial(0.3)", "hinge(0.5, 2)"]),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_a_fresh_update_counts_fully_and_an_older_one_never_more(text: str, age: int, more: int) -> None:
    weight = staleness.parse(text)
    assert weight.weight(0) == 1.0
    assert 0 < weight.weight(age + more) <= weight.weight(age) <= 1


@pytest.mark.parametrize(
    "text",
    ["", "linear", "polynomial", "polynomial(0)", "polynomial(-1)", "polynomial(1, 2)", "polynomial(nan)",
     "polynomial(x)", "hinge(1)", "hinge(0, 1)", "hinge(1, -1)", "constant(1)", "polynomial(1))", "polynomial(inf)"],
)  # fmt: skip
def test_an_invalid_weight_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected constant, polynomial\(0.5\) or hinge\(10, 4\)"):
        staleness.parse(text)


def test_a_discounted_update_is_shorter_and_stays_float32() -> None:
    update = Update({"w": np.array([2.0, -4.0], np.float32)}, 10, 3, 0.5)
    assert staleness.discount(update, 1.0) is update
    half = staleness.discount(update, 0.5)
    assert half.delta["w"].tolist() == [1.0, -2.0] and half.delta["w"].dtype == np.float32
    assert (half.num_examples, half.num_steps, half.train_loss) == (10, 3, 0.5)
