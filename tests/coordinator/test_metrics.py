"""The figures that people judge by equal scikit-learn's; what the rows do not define is None."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sklearn import metrics as sklearn_metrics
from sklearn.calibration import calibration_curve

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.reports import figures, metrics
from coordinator.reports.figures import Judged, LabelledRows
from coordinator.runs.model_setup import positive_class
from edge_client.train.evaluation import Evaluation, score, softmax
from edge_client.wire.scores import CALIBRATION_BINS

pytestmark = pytest.mark.slow  # imports scikit-learn, which takes seconds


CLASSES = (2, 3, 7)


def rows(classes: int, count: int = 400) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Logits with ties, of a model that is better than chance."""
    rng = np.random.default_rng(classes)
    y = rng.integers(classes, size=count).astype(np.int32)
    logits = np.round(rng.normal(size=(count, classes)) + 1.5 * np.eye(classes)[y], 1)
    return logits.astype(np.float32), y


@pytest.mark.parametrize("classes", CLASSES)
def test_figures_equal_those_of_scikit_learn(classes: int) -> None:
    logits, y = rows(classes)
    got = metrics.classification(logits, y, [])
    p, predicted = softmax(logits), logits.argmax(axis=1)
    average = "binary" if classes == 2 else "macro"
    precision, recall, f1, _ = sklearn_metrics.precision_recall_fscore_support(y, predicted, average=average)
    scores = p[:, 1] if classes == 2 else p
    expected = {
        "sensitivity": recall,
        "precision": precision,
        "f1": f1,
        "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(y, predicted),
        "auc": sklearn_metrics.roc_auc_score(y, scores, multi_class="ovr"),
        "brier": sklearn_metrics.brier_score_loss(y, scores),
    }
    assert {key: got[key] for key in expected} == pytest.approx(expected)
    np.testing.assert_array_equal(got["confusion"], sklearn_metrics.confusion_matrix(y, predicted))


@pytest.mark.parametrize("classes", CLASSES)
def test_figures_of_each_class_equal_those_of_scikit_learn(classes: int) -> None:
    logits, y = rows(classes)
    p, predicted = softmax(logits), logits.argmax(axis=1)
    each = sklearn_metrics.precision_recall_fscore_support(y, predicted)
    listed = metrics.classification(logits, y, [f"kind {index}" for index in range(classes)])["classes"]
    for index, got in enumerate(listed):
        (tn, fp), _ = sklearn_metrics.confusion_matrix(y == index, predicted == index)
        assert got == {
            "class": f"kind {index}",
            "rows": each[3][index],
            "sensitivity": pytest.approx(each[1][index]),
            "specificity": pytest.approx(tn / (tn + fp)),
            "precision": pytest.approx(each[0][index]),
            "f1": pytest.approx(each[2][index]),
            "auc": pytest.approx(sklearn_metrics.roc_auc_score(y == index, p[:, index])),
        }


@pytest.mark.parametrize("classes", CLASSES)
def test_calibration_equals_scikit_learns_curve(classes: int) -> None:
    logits, y = rows(classes)
    p = softmax(logits)
    stated = p[:, 1] if classes == 2 else p.max(axis=1)
    came_true = y == 1 if classes == 2 else p.argmax(axis=1) == y
    observed, predicted = calibration_curve(came_true, stated, n_bins=CALIBRATION_BINS)
    got = metrics.classification(logits, y, [])
    assert [line["observed"] for line in got["calibration"]] == pytest.approx(observed.tolist())
    assert [line["predicted"] for line in got["calibration"]] == pytest.approx(predicted.tolist())
    weights = [line["rows"] for line in got["calibration"]]
    assert got["ece"] == pytest.approx(np.average(np.abs(observed - predicted), weights=weights))


def test_rows_of_one_class_define_neither_auc_nor_the_other_class() -> None:
    got = metrics.classification(np.array([[1, 0], [0, 1]], np.float32), np.array([0, 0], np.int32), [])
    assert (got["auc"], got["sensitivity"]) == (None, None)
    assert (got["specificity"], got["balanced_accuracy"]) == (0.5, 0.5)
    assert got["classes"][1] == {
        "class": "1", "rows": 0, "sensitivity": None, "specificity": 0.5, "precision": 0.0, "f1": 0.0, "auc": None,
    }  # fmt: skip


def test_no_rows_define_nothing() -> None:
    got = metrics.classification(np.zeros((0, 3), np.float32), np.zeros(0, np.int32), [])
    assert set(metrics.headline(got).values()) == {None}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_diverged_model_has_no_probabilities(value: float) -> None:
    logits = np.array([[value, 0], [0, 1]], np.float32)
    got = metrics.classification(logits, np.array([0, 1], np.int32), [])
    assert (got["auc"], got["brier"], got["ece"]) == (None, None, None)
    assert sum(map(sum, got["confusion"])) == 2


def info(**changed: Any) -> dict[str, Any]:
    return {
        "task": "classification", "classes": 2, "class_names": ["no", "yes"], "site_names": ["a", "b", "c"],
    } | changed  # fmt: skip


def judged(alone: bool = False) -> Judged:
    """Six rows at site a, all right but one; two at site b, of one class."""
    y = np.array([0, 1, 0, 1, 1, 1, 0, 0], np.int32)
    logits = np.array([[2, 0], [0, 2], [2, 0], [0, 2], [0, 2], [1, 0], [2, 0], [2, 0]], np.float32)
    scored = score(logits, y)
    final = Evaluation(scored.loss_sum, scored.correct, scored.labels, logits)
    test = LabelledRows(y, np.array([0] * 6 + [1] * 2, np.int32))
    train = LabelledRows(np.array([1, 1, 1, 0, 0], np.int32), np.array([0, 0, 0, 1, 1], np.int32))
    own = Evaluation(1.0, np.array([1, 0, 0, 0, 0, 0, 1, 1]), scored.labels, -logits) if alone else None
    return Judged(final, test, train, own)


def test_each_site_has_its_own_figures() -> None:
    found = figures.by_site(judged(), info())
    assert found["a"]["test_rows"] == 6
    assert found["a"]["metrics"]["confusion"] == [[2, 0], [1, 3]]
    assert (found["a"]["metrics"]["sensitivity"], found["a"]["metrics"]["auc"]) == (0.75, 1.0)
    assert (found["b"]["metrics"]["auc"], found["b"]["metrics"]["specificity"]) == (None, 1.0)
    assert found["c"]["test_accuracy"] is None
    assert set(metrics.headline(found["c"]["metrics"]).values()) == {None}


def test_the_majority_class_is_that_of_the_training_rows() -> None:
    assert figures.of_all(judged(), info())["baselines"] == {
        "majority": {"class": "yes", "test_accuracy": 0.5}
    }
    found = figures.by_site(judged(), info())
    assert found["a"]["baselines"]["majority"] == {"class": "yes", "test_accuracy": 4 / 6}
    assert found["b"]["baselines"]["majority"] == {"class": "no", "test_accuracy": 1.0}
    assert found["c"]["baselines"]["majority"] == {"class": None, "test_accuracy": None}


def test_models_trained_alone_are_judged_by_the_same_figures() -> None:
    found = figures.of_all(judged(alone=True), info())["baselines"]["local"]
    assert (found["test_accuracy"], found["auc"]) == (
        3 / 8,
        pytest.approx(1 - figures.of_all(judged(), info())["metrics"]["auc"]),
    )
    assert figures.by_site(judged(alone=True), info())["b"]["baselines"]["local"]["test_accuracy"] == 1.0


def test_sites_of_many_classes_list_no_confusion() -> None:
    many = figures.MAX_CLASSES_PER_SITE + 1
    logits = np.zeros((8, many), np.float32)
    scored = score(logits, judged().test.y)
    wide = Judged(
        Evaluation(scored.loss_sum, scored.correct, scored.labels, logits), judged().test, judged().train
    )
    described = info(classes=many, class_names=[])
    assert "confusion" in figures.of_all(wide, described)["metrics"]
    assert not {"confusion", "classes"} & set(figures.by_site(wide, described)["a"]["metrics"])


def test_only_few_rows_and_classes_have_such_figures() -> None:
    assert figures.has_metrics(info(classes=metrics.MAX_CLASSES), 1000)
    assert not figures.has_metrics(info(classes=metrics.MAX_CLASSES + 1), 1000)
    assert not figures.has_metrics(info(), figures.MAX_LOGITS)
    assert not figures.has_metrics(info(task="next_token"), 1)


def test_a_language_model_has_its_perplexity() -> None:
    y = np.zeros((2, 3), np.int32)
    final = score(np.zeros((2, 3, 4), np.float32), y)
    found = figures.of_all(Judged(final, LabelledRows(y), LabelledRows(y)), info(task="next_token"))
    assert found == {"metrics": {"perplexity": pytest.approx(4.0)}}


def test_figures_of_a_regression_equal_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(5)
    y = rng.normal(size=200).astype(np.float32)
    outputs = (0.8 * y + rng.normal(scale=0.3, size=200)).astype(np.float32)
    mean, deviation = 30.0, 12.0
    real, predicted = y.astype(np.float64) * deviation + mean, outputs.astype(np.float64) * deviation + mean
    assert metrics.regression(outputs, y, deviation) == {
        "r2": pytest.approx(sklearn_metrics.r2_score(real, predicted)),
        "mae": pytest.approx(sklearn_metrics.mean_absolute_error(real, predicted)),
        "rmse": pytest.approx(sklearn_metrics.root_mean_squared_error(real, predicted)),
    }


def test_equal_labels_define_no_r2() -> None:
    got = metrics.regression(np.array([1, 2], np.float32), np.array([1, 1], np.float32), 2.0)
    assert got == {"r2": None, "mae": 1.0, "rmse": pytest.approx(2**0.5)}
    empty = np.zeros(0, np.float32)
    assert set(metrics.regression(empty, empty, 2.0).values()) == {None}
    assert set(metrics.regression(np.array([np.nan], np.float32), empty[:1], 2.0).values()) == {None}


def test_a_regression_is_judged_beside_the_mean_of_the_training_rows() -> None:
    y = np.array([0.0, 1.0, 2.0], np.float32)
    outputs = np.array([[0.0], [1.0], [1.0]], np.float32)
    scored = score(outputs, y)
    assert scored.loss == pytest.approx(1 / 3)
    final = Evaluation(scored.loss_sum, scored.correct, scored.labels, outputs)
    sites = np.array([0, 0, 1], np.int32)
    own = Evaluation(0.0, scored.correct, scored.labels, y[:, None])
    all_rows = Judged(
        final, LabelledRows(y, sites), LabelledRows(np.array([1, 1, 3], np.float32), sites), own
    )
    described = info(task="regression", classes=1, class_names=[], label_scale=[100.0, 10.0])
    found = figures.of_all(all_rows, described)
    assert found["metrics"] == {"r2": 0.5, "mae": pytest.approx(10 / 3), "rmse": pytest.approx(10 / 3**0.5)}
    assert found["baselines"]["mean"]["value"] == pytest.approx(100 + 10 * 5 / 3)
    assert found["baselines"]["local"] == {"r2": 1.0, "mae": 0.0, "rmse": 0.0}
    per_site = figures.by_site(all_rows, described)
    assert per_site["a"]["baselines"]["mean"] == {
        "value": 110.0,
        "r2": -1.0,
        "mae": 5.0,
        "rmse": pytest.approx(50**0.5),
    }
    assert (per_site["b"]["test_accuracy"], per_site["b"]["metrics"]["r2"]) == (None, None)
    assert per_site["c"]["baselines"]["mean"]["value"] is None


@pytest.mark.parametrize("positive", [0, 1])
def test_the_positive_class_of_two_can_be_chosen(positive: int) -> None:
    logits, y = rows(2)
    got = metrics.classification(logits, y, ["ill", "well"], positive)
    predicted, chances = logits.argmax(axis=1), softmax(logits)[:, positive]
    assert got["positive"] == ("ill", "well")[positive]
    assert got["sensitivity"] == pytest.approx(sklearn_metrics.recall_score(y, predicted, pos_label=positive))
    assert got["f1"] == pytest.approx(sklearn_metrics.f1_score(y, predicted, pos_label=positive))
    assert got["auc"] == pytest.approx(sklearn_metrics.roc_auc_score(y == positive, chances))


def test_a_positive_class_that_the_data_does_not_have_is_refused() -> None:
    given = Experiment.model_validate({"data": {"positive": "ill"}})
    assert positive_class(given, ["ill", "well"], 2, "classification") == 0
    for names, classes, task in (
        (["no", "yes"], 2, "classification"),
        ([], 3, "classification"),
        ([], 1, "regression"),
    ):
        with pytest.raises(UserError, match=r"data\.positive = 'ill'"):
            positive_class(given, names, classes, task)


def test_a_metric_that_the_held_out_rows_cannot_have_is_reported_with_the_reason() -> None:
    classes = {"task": "classification", "classes": 2}
    y = np.array([0, 1, 1])
    assert figures.why_no_metric("auc", classes, y) is None
    assert figures.why_no_metric("loss", {"task": "next_token", "classes": 9}, y) is None
    assert figures.why_no_metric("auc", classes, y[1:]) == "the held-out rows are all of one class"
    assert "data.task = 'classification'" in str(figures.why_no_metric("f1", {"task": "next_token"}, y))
    assert "data.task = 'regression'" in str(figures.why_no_metric("r2", classes, y))
    assert "at most 100 classes" in str(figures.why_no_metric("auc", {**classes, "classes": 101}, y))
