"""Figures of the devices' own rows: pooled so that no device decides them, whatever it says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.pooling import (
    MAX_LOSS,
    bounded_loss,
    label_cap,
)
from coordinator.runs.live_evaluation import Labels, pool_results
from edge_client.wire.device import EvaluationResult
from edge_client.wire.quantities import QuantitySums

pytestmark = pytest.mark.slow  # imports scikit-learn, which takes seconds


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


def reported(outputs: npt.NDArray[np.float64], y: npt.NDArray[np.float64], site: str) -> EvaluationResult:
    sums = QuantitySums(float(np.abs(outputs - y).sum()), float(y.sum()), float(np.square(y).sum()))
    squared = float(np.square(outputs - y).sum())
    return EvaluationResult("ab" * 32, len(y), len(y), 0, squared, site, sums)


def test_sums_over_quantities_give_scikit_learns_figures_of_all_rows() -> None:
    rng = np.random.default_rng(1)
    y = rng.normal(size=(3, 40)) + np.arange(3)[:, None]
    outputs = y + rng.normal(scale=0.5, size=y.shape)
    results = {str(at): reported(outputs[at], y[at], f"site {at}") for at in range(3)}
    found = pool_results(results, Labels(scale=(100.0, 7.0)))
    assert found is not None and found.clients == {}
    own, predicted = y.ravel() * 7 + 100, outputs.ravel() * 7 + 100
    assert found.figures["test_accuracy"] is None
    assert found.figures["metrics"] == {
        "r2": pytest.approx(sklearn.metrics.r2_score(own, predicted)),
        "mae": pytest.approx(sklearn.metrics.mean_absolute_error(own, predicted)),
        "rmse": pytest.approx(sklearn.metrics.root_mean_squared_error(own, predicted)),
    }
    of_site = found.per_site["site 2"]["metrics"]["r2"]
    assert of_site == pytest.approx(sklearn.metrics.r2_score(y[2], outputs[2]))


def test_a_device_without_sums_has_a_loss_and_no_figures_of_its_own() -> None:
    rng = np.random.default_rng(1)
    y = rng.normal(size=40)
    few = replace(reported(y[:5] + 1, y[:5], "few"), quantity=None)
    found = pool_results({"few": few, "many": reported(y + 0.5, y, "many")}, Labels(scale=(0.0, 2.0)))
    assert found is not None
    assert "metrics" not in found.per_site["few"] and found.per_site["few"]["test_loss"] == pytest.approx(1)
    assert found.figures["metrics"]["mae"] == pytest.approx(1)
    equal = pool_results({"a": reported(np.ones(10), np.zeros(10), "")}, Labels(scale=(0.0, 2.0)))
    assert equal is not None
    assert equal.figures["metrics"] == {"r2": None, "mae": 2, "rmse": 2}


@given(
    st.floats(0, allow_infinity=False),
    st.floats(allow_infinity=False, allow_nan=False),
    st.floats(0, allow_infinity=False),
    st.floats(0, allow_infinity=False),
)
def test_no_sums_of_a_liar_move_the_mean_error_beyond_its_share(
    loss: float, labels: float, squares: float, absolute: float
) -> None:
    y = np.random.default_rng(1).normal(size=40)
    lie = EvaluationResult("ab" * 32, 2**53, 2**53, 0, loss, "", QuantitySums(absolute, labels, squares))
    honest = {name: reported(y + 0.5, y, "") for name in "abc"}
    found = pool_results({**honest, "liar": lie}, Labels(scale=(0.0, 1.0)))
    assert found is not None
    assert found.figures["metrics"]["mae"] <= 0.375 + np.sqrt(MAX_LOSS) / 4 + 1e-9
    assert all(value is None or np.isfinite(value) for value in found.figures["metrics"].values())
