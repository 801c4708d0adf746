"""Figures of a run's final model: of all held-out rows and of each site, beside those of baselines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.reports import metrics
from coordinator.workers.evaluation import accuracy_of_tested, score_sites
from edge_client.data.examples import PADDING
from edge_client.train.evaluation import Evaluation

MAX_CLASSES_PER_SITE = 20
"""Most classes for which sites list figures of every class and their confusion."""
MAX_LOGITS = 20_000_000
"""Most logits, rows times classes, from which figures of classes are computed; they are held in memory."""
Rows = npt.NDArray[np.bool_] | slice

_DETAILS = ("classes", "confusion")


@dataclass(frozen=True)
class LabelledRows:
    """Labels of rows and their sites. `y`: [N], or [N, T] for sequences; standardised quantities for a
    regression. `sites`: site index of each row, None without sites."""

    y: npt.NDArray[Any]
    sites: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Judged:
    """What a final model is judged by.

    Attributes:
        final: the model on the test rows, with logits if there are figures of classes.
        test, train: the test rows, and those that the clients train on.
        alone: each test row scored by the model that its client trained alone, or None.
        adapted: each test row scored by a model of its client alone: "personalised", that which the strategy gave it, and "fine_tuned",
            the final model after the client fine-tuned it; if there is one, `owners` has the index of the client of each test row.
    """

    final: Evaluation
    test: LabelledRows
    train: LabelledRows
    alone: Evaluation | None = None
    adapted: Mapping[str, Evaluation] = field(default_factory=dict)
    owners: npt.NDArray[np.int32] | None = None


def has_metrics(data_info: Mapping[str, Any], test_rows: int) -> bool:
    """Whether figures of classes are computed for this data, which needs the logits of every test row."""
    classes: int = data_info["classes"]
    is_moderate = classes <= metrics.MAX_CLASSES and classes * test_rows <= MAX_LOGITS
    return data_info["task"] != "next_token" and is_moderate


def round_metric(
    name: str, scored: Evaluation, y: npt.NDArray[Any], data_info: Mapping[str, Any]
) -> float | None:
    """One of the final model's `metrics`, of the model after a round; None for the loss, and if the rows do not define it.

    `scored`: the held-out rows, with logits. `y`: their labels.
    """
    if name == "loss" or scored.logits is None:
        return None
    found = _metrics(scored.logits, y, data_info)[name]
    return None if found is None else float(found)


def why_no_metric(name: str, data_info: Mapping[str, Any], y: npt.NDArray[Any]) -> str | None:
    """Why the held-out rows do not give this figure after a round, None if they do. `y`: their labels."""
    if name == "loss":
        return None
    if (reason := metric_blocking_reason(name, data_info["task"])) is not None:
        return reason
    if not has_metrics(data_info, len(y)):
        return (
            f"it needs at most {metrics.MAX_CLASSES} classes, and {MAX_LOGITS:,} held-out rows times classes"
        )
    if name != "r2" and len(np.unique(y[y != PADDING])) < 2:
        return "the held-out rows are all of one class"
    return None


def metric_blocking_reason(name: str, task: str) -> str | None:
    """Why models for this task have no such figure; None if they have."""
    expected = "regression" if name == "r2" else "classification"
    return (
        None
        if task == expected
        else f"it is a figure of data.task = {expected!r}, and the data is for {task!r}"
    )


def of_all(judged: Judged, data_info: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics` and `baselines` over all test rows, each only if there are any."""
    everything = slice(None)  # no copy
    if data_info["task"] == "next_token":
        loss = judged.final.loss
        perplexity = math.exp(loss) if math.isfinite(loss) and loss < 700 else None
        return {"metrics": {"perplexity": perplexity}, **_baselines(judged, data_info, everything, None)}
    return _figures(judged, data_info, everything, None, detailed=True)


def by_client(judged: Judged, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Accuracy of the final model, and of each client's own ones, for each client with labelled test rows; empty without such."""
    owners = judged.owners
    if not judged.adapted or owners is None:
        return {}
    plain = accuracy_of_tested(judged.final, owners, names)
    adapted = {
        f"{key}_accuracy": accuracy_of_tested(scored, owners, names) for key, scored in judged.adapted.items()
    }
    rows = np.bincount(owners, minlength=len(names))
    return {
        name: {
            "test_rows": int(rows[index]),
            "test_accuracy": plain[name],
            **{key: accuracies[name] for key, accuracies in adapted.items()},
        }
        for index, name in enumerate(names)
        if name in plain
    }


def by_site(judged: Judged, data_info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows, accuracy, `metrics` and `baselines` of each site; empty if the data has no sites."""
    sites, names = judged.test.sites, data_info["site_names"]
    if sites is None:
        return {}
    scored = score_sites(judged.final, sites, names)
    if _is_regression(data_info):
        scored = {name: {**each, "test_accuracy": None} for name, each in scored.items()}
    detailed = data_info["classes"] <= MAX_CLASSES_PER_SITE
    return {
        name: {**scored[name], **_figures(judged, data_info, sites == index, index, detailed=detailed)}
        for index, name in enumerate(names)
    }


def _figures(
    judged: Judged,
    data_info: Mapping[str, Any],
    chosen: Rows,
    site: int | None,
    *,
    detailed: bool,
) -> dict[str, Any]:
    """Figures of the test rows `chosen`, which are those of `site`, or all if it is None."""
    baselines = _baselines(judged, data_info, chosen, site)
    if judged.final.logits is None:
        return baselines
    figures = _metrics(judged.final.logits[chosen], judged.test.y[chosen], data_info)
    kept = {key: value for key, value in figures.items() if detailed or key not in _DETAILS}
    return {"metrics": kept, **baselines}


def _metrics(
    logits: npt.NDArray[np.float32], y: npt.NDArray[Any], data_info: Mapping[str, Any]
) -> dict[str, Any]:
    if _is_regression(data_info):
        return _regression(logits[:, 0], y, data_info)
    return metrics.classification(logits, y, data_info["class_names"], data_info.get("positive", 1))


def _baselines(
    judged: Judged, data_info: Mapping[str, Any], chosen: Rows, site: int | None
) -> dict[str, Any]:
    if _is_regression(data_info):
        return {"baselines": _regression_baselines(judged, data_info, chosen, site)}
    found: dict[str, Any] = {}
    if judged.test.y.ndim == 1:
        found["majority"] = _majority(judged, data_info["class_names"], chosen, site)
    if judged.alone is not None:
        found["local"] = _alone(judged.alone, judged.test.y, data_info, chosen)
    return {"baselines": found} if found else {}


def _majority(judged: Judged, names: Sequence[str], chosen: Rows, site: int | None) -> dict[str, Any]:
    """The most frequent class of the site's training rows (of all, without a site), and its accuracy on the test rows."""
    train, test = _training_labels(judged, site), judged.test.y[chosen]
    if not len(train):
        return {"class": None, "test_accuracy": None}
    winner = int(np.bincount(train[train >= 0], minlength=1).argmax())
    return {
        "class": str(names[winner]) if names else str(winner),
        "test_accuracy": float((test == winner).mean()) if len(test) else None,
    }


def _training_labels(judged: Judged, site: int | None) -> npt.NDArray[Any]:
    """Of the site, or of all rows."""
    y, sites = judged.train.y, judged.train.sites
    return y if site is None or sites is None else np.asarray(y[sites == site])


def _is_regression(data_info: Mapping[str, Any]) -> bool:
    return bool(data_info["task"] == "regression")


def _regression(
    outputs: npt.NDArray[np.float32], y: npt.NDArray[np.float32], data_info: Mapping[str, Any]
) -> dict[str, Any]:
    return metrics.regression(outputs, y, data_info["label_scale"][1])


def _regression_baselines(
    judged: Judged, data_info: Mapping[str, Any], chosen: Rows, site: int | None
) -> dict[str, Any]:
    """Always answering the mean of the training rows, and the models that the clients trained alone."""
    train, test = _training_labels(judged, site), judged.test.y[chosen]
    mean, deviation = data_info["label_scale"]
    constant = float(train.mean(dtype=np.float64)) if len(train) else None
    found: dict[str, Any] = {"mean": {"value": None, **dict.fromkeys(metrics.REGRESSION)}}
    if constant is not None:
        answers = np.full(len(test), constant, np.float32)
        found["mean"] = {"value": constant * deviation + mean, **_regression(answers, test, data_info)}
    if judged.alone is not None and judged.alone.logits is not None:
        found["local"] = _regression(judged.alone.logits[chosen, 0], test, data_info)
    return found


def _alone(
    alone: Evaluation, y: npt.NDArray[np.int32], data_info: Mapping[str, Any], chosen: Rows
) -> dict[str, Any]:
    labels = int(alone.labels[chosen].sum())
    found = {"test_accuracy": int(alone.correct[chosen].sum()) / labels if labels else None}
    if alone.logits is None:
        return found
    return {**found, **metrics.headline(_metrics(alone.logits[chosen], y[chosen], data_info))}
