"""Figures of the devices' own rows: pooled so that no device decides them, whatever it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.pooling import (
    MAX_LOSS,
    bounded_loss,
    label_cap,
)
from coordinator.runs.live_evaluation import pool_results
from edge_client.wire.device import EvaluationResult

HONEST = EvaluationResult("ab" * 32, rows=10, labels=10, correct=9, loss_sum=5.0, site="north")
LIAR = replace(HONEST, rows=2**53, labels=2**53, correct=0, loss_sum=1.7e308, site="")


def test_the_cap_is_the_median_devices_labels_the_lower_of_two() -> None:
    assert label_cap([7]) == 7
    assert label_cap([40, 2**53]) == 40
    assert label_cap([30, 10, 20]) == 20


def test_no_device_counts_for_more_labels_than_the_median_one() -> None:
    found = pool_results({"a": HONEST, "b": HONEST, "c": HONEST, "liar": LIAR})
    assert found is not None
    assert found.figures["test_accuracy"] == pytest.approx(27 / 40)  # a quarter of it is the liar's, not all
    assert found.figures["label_cap"] == 10
    assert found.clients == {"a": 0.9, "b": 0.9, "c": 0.9, "liar": 0.0}


def test_a_device_that_names_the_site_of_others_owns_its_figure_no_more_than_they_do() -> None:
    found = pool_results({"a": HONEST, "b": HONEST, "liar": replace(LIAR, site="north")})
    assert found is not None
    assert found.per_site["north"]["test_accuracy"] == pytest.approx(18 / 30)


def test_losses_beyond_all_bounds_give_a_finite_figure() -> None:
    """Two sums that are finite each add up to infinity, which JSON has no word for."""
    found = pool_results({"a": replace(HONEST, loss_sum=1.7e308), "b": replace(HONEST, loss_sum=1.7e308)})
    assert found is not None
    assert found.figures["test_loss"] == MAX_LOSS
    assert bounded_loss(5.0, 10) == 5.0


def test_honest_figures_are_those_of_all_labels_together() -> None:
    results = {"a": HONEST, "b": replace(HONEST, labels=8, correct=4, loss_sum=8.0)}
    results |= {"c": replace(HONEST, labels=10, correct=2, loss_sum=1.0)}
    found = pool_results(results)
    assert found is not None
    assert (found.figures["test_accuracy"], found.figures["test_loss"], found.figures["test_rows"]) == (
        15 / 28,
        14 / 28,
        30,
    )


@given(
    st.lists(
        st.builds(
            EvaluationResult,
            base=st.just("ab" * 32),
            rows=st.integers(1, 2**53),
            labels=st.integers(1, 2**53),
            correct=st.just(0),
            loss_sum=st.floats(0, allow_infinity=False),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_figures_of_devices_overflow(results: list[EvaluationResult]) -> None:
    found = pool_results({str(at): result for at, result in enumerate(results)})
    assert found is not None
    assert 0 <= found.figures["test_loss"] <= MAX_LOSS * (1 + 1e-9) and math.isfinite(
        found.figures["test_loss"]
    )
    assert 0 <= found.figures["test_accuracy"] <= 1
