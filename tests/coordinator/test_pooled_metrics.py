"""The figures of devices' own rows, from the counts that they report, beside scikit-learn's on the rows themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from coordinator.reports import metrics
from coordinator.runs.live_evaluation import Labels, pool_results
from edge_client.data.examples import PADDING
from edge_client.train.class_scores import class_scores
from edge_client.train.evaluation import softmax
from edge_client.wire.device import EvaluationResult
from edge_client.wire.scores import MAX_CLASSES, SCORE_BINS, checks, has_small_class

pytestmark = pytest.mark.slow  # imports scikit-learn, which takes seconds


SIZES = (60, 60, 90, 130)
FIGURES = ("balanced_accuracy", "sensitivity", "specificity", "precision", "f1", "brier", "ece")


def rows(
    classes: int, count: int, seed: int = 0, sharpness: float = 1.0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Logits of a model that is better than chance, and labels."""
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=count).astype(np.int32)
    logits = rng.normal(size=(count, classes)) + 1.5 * np.eye(classes)[y]
    return (sharpness * logits).astype(np.float32), y


def reported(logits: npt.NDArray[np.float32], y: npt.NDArray[np.int32], site: str) -> EvaluationResult:
    correct = int((logits.argmax(axis=1) == y).sum())
    return EvaluationResult("ab" * 32, len(y), len(y), correct, 1.0, site, scores=class_scores(logits, y))


def pooled(results: dict[str, EvaluationResult], about: Labels | None = None) -> dict[str, Any]:
    found = pool_results(results, about or Labels())
    assert found is not None
    figures: dict[str, Any] = found.figures["metrics"]
    return figures


def four_devices(
    classes: int, sharpness: float = 1.0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], dict[str, EvaluationResult], npt.NDArray[Any]]:
    """All rows, what four devices report of them, and the weight of each row under the cap."""
    logits, y = rows(classes, sum(SIZES), classes, sharpness)
    ends = np.cumsum(SIZES)
    results = {
        f"device {at}": reported(logits[end - size : end], y[end - size : end], f"site {at}")
        for at, (size, end) in enumerate(zip(SIZES, ends, strict=True))
    }
    weights = np.concatenate([np.full(size, min(1.0, SIZES[1] / size)) for size in SIZES])
    return logits, y, results, weights


@pytest.mark.parametrize("sharpness", [1.0, 8.0])
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_figures_of_four_devices_are_scikit_learns_of_their_rows(classes: int, sharpness: float) -> None:
    logits, y, results, weights = four_devices(classes, sharpness)
    got, p = pooled(results), softmax(logits)
    one_vs_rest = {
        "y_score": p[:, 1] if classes == 2 else p,
        "sample_weight": weights,
        "multi_class": "ovr",
    }
    exact = sklearn.metrics.roc_auc_score(y, **one_vs_rest)
    assert 0 < got["auc_error"] < 0.5
    assert abs(got["auc"] - exact) <= got["auc_error"] + 1e-12
    np.testing.assert_array_equal(
        got["confusion"], sklearn.metrics.confusion_matrix(y, logits.argmax(axis=1))
    )
    average = "binary" if classes == 2 else "macro"
    precision, recall, f1, _ = sklearn.metrics.precision_recall_fscore_support(
        y, logits.argmax(axis=1), average=average, sample_weight=weights
    )
    assert (got["precision"], got["sensitivity"], got["f1"]) == pytest.approx((precision, recall, f1))
    assert (got["rows"], got["devices"]) == (sum(SIZES), 4)


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("classes", [2, 5])
def test_a_device_of_its_own_has_the_figures_of_its_rows(classes: int, positive: int) -> None:
    logits, y, results, _ = four_devices(classes)
    names = [f"kind {index}" for index in range(classes)]
    found = pool_results(results, Labels(names, positive))
    assert found is not None
    got = found.per_site["site 3"]["metrics"]
    expected = metrics.classification(logits[-SIZES[3] :], y[-SIZES[3] :], names, positive)
    assert {key: got[key] for key in FIGURES} == pytest.approx({key: expected[key] for key in FIGURES})
    assert (got["positive"], got["confusion"]) == (expected["positive"], expected["confusion"])
    assert [each["rows"] for each in got["classes"]] == [each["rows"] for each in expected["classes"]]
    assert abs(got["auc"] - expected["auc"]) <= got["auc_error"]


def test_the_stated_error_of_the_auc_is_reached_where_all_pairs_share_bins() -> None:
    logits = np.log(np.array([[0.5021, 0.4979], [0.5024, 0.4976]])).astype(np.float32)
    y = np.array([1, 0], np.int32)
    got = pooled({"a": reported(logits, y, "")})
    exact = metrics.classification(logits, y, [])["auc"]
    assert (got["auc"], got["auc_error"], exact) == (0.5, 0.5, 1.0)


def test_figures_that_no_device_reports_are_absent() -> None:
    logits, y = rows(2, 40)
    silent = replace(reported(logits, y, "south"), scores=None)
    assert pool_results({"a": silent}).figures.keys().isdisjoint({"metrics"})  # type: ignore[union-attr]
    found = pool_results({"a": reported(logits, y, "north"), "b": silent})
    assert found is not None
    assert (found.figures["metrics"]["devices"], found.figures["metrics"]["rows"]) == (1, 40)
    assert "metrics" not in found.per_site["south"]
    one_class = pooled({"a": reported(logits[y == 0], y[y == 0], "")})
    assert (one_class["auc"], one_class["auc_error"], one_class["sensitivity"]) == (None, None, None)


def test_a_device_that_claims_the_worst_of_more_rows_than_there_are_moves_figures_by_its_share() -> None:
    logits, y = rows(2, 40)
    honest = {name: reported(logits, y, "") for name in "abc"}
    many = 2**50
    none, rest = (0,) * (SCORE_BINS - 1), (0,) * 9
    lie = reported(logits, y, "")
    assert lie.scores is not None
    worst = replace(
        lie.scores, confusion=((0, many), (many, 0)), positives=((many, *none),), negatives=((*none, many),),
        calibration_rows=(many, *rest[1:], many), calibration_correct=(many, *rest),
        calibration_sums=(0.0, *([0.0] * 8), float(many)), squared_sum=4.0 * many,
    )  # fmt: skip
    liar = replace(lie, rows=2 * many, labels=2 * many, correct=0, scores=worst)
    assert all(holds for holds, _ in checks(worst, 2 * many, 0, 2))
    got, without = pooled({**honest, "liar": liar}), pooled(honest)
    for key in ("sensitivity", "specificity", "balanced_accuracy"):
        assert without[key] - got[key] < 0.3  # of four devices it counts for one
    assert without["auc"] - got["auc"] < 0.5 and got["ece"] < without["ece"] + 0.3
    json_numbers = [value for value in got.values() if isinstance(value, float)]
    assert np.isfinite(json_numbers).all()


@given(st.integers(2, MAX_CLASSES), st.integers(0, 80), st.integers(0, 9))
def test_counts_of_any_rows_pass_the_checks(classes: int, count: int, seed: int) -> None:
    logits, y = rows(classes, count, seed)
    y[: count // 4] = PADDING
    scores = class_scores(logits, y)
    assert scores is not None
    counted = y != PADDING
    correct = int((logits.argmax(axis=1) == y)[counted].sum())
    assert [
        problem for holds, problem in checks(scores, int(counted.sum()), correct, classes) if not holds
    ] == []


BAD: list[dict[str, Any]] = [
    {"confusion": ((1, 2, 3), (1, 2, 3))},
    {"confusion": ((-1, 21), (0, 20))},
    {"confusion": ((20, 0), (0, 21))},
    {"positives": ((20,),)},
    {"positives": ((0,) * SCORE_BINS,)},
    {"negatives": ((1,) * SCORE_BINS,)},
    {"calibration_rows": (0,) * 10},
    {"calibration_correct": (40,) + (0,) * 9},
    {"calibration_sums": (40.0,) * 10},
    {"calibration_sums": (0.0,)},
    {"squared_sum": -1.0},
    {"squared_sum": 81.0},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_counts_that_no_rows_have_are_refused(bad: dict[str, Any]) -> None:
    y = np.arange(40, dtype=np.int32) % 2
    logits = rows(2, 40)[0]
    scores = class_scores(logits, y)
    assert scores is not None
    correct = int((logits.argmax(axis=1) == y).sum())
    problem = next(problem for holds, problem in checks(replace(scores, **bad), 40, correct, 2) if not holds)
    assert problem.startswith((next(iter(bad)), "a count", "histograms", "calibration"))
    assert any(not holds for holds, _ in checks(scores, 40, correct, 3))


def test_nothing_is_counted_of_many_classes_of_sequences_and_of_a_diverged_model() -> None:
    assert class_scores(*rows(MAX_CLASSES + 1, 30)) is None
    assert class_scores(np.zeros((4, 6, 3), np.float32), np.zeros((4, 6), np.int32)) is None
    assert class_scores(np.full((4, 2), np.nan, np.float32), np.zeros(4, np.int32)) is None


def test_a_class_of_few_rows_is_small_and_one_without_rows_is_not() -> None:
    logits, y = rows(2, 40)
    few = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:3]])
    for chosen, minimum, small in ((few, 4, True), (few, 3, False), (y == 0, 10, False)):
        scores = class_scores(logits[chosen], y[chosen])
        assert scores is not None and has_small_class(scores, minimum) == small
