"""The table of a sweep: means over seeds that are never of some seeds only."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.reports import sweep

PLAN = {
    "name": "digits",
    "keys": ["local.lr"],
    "rows": [
        {
            "values": {"local.lr": lr},
            "label": f"local.lr={lr}",
            "seeds": [7, 8],
            "folders": [f"{lr}-7", f"{lr}-8"],
        }
        for lr in ("0.1", "9")
    ],
}


def report(accuracy: float, loss: float | None) -> dict[str, Any]:
    start = {"test_accuracy": 0.1, "test_loss": 2.3}
    rounds = [{"round": 1, "test_accuracy": accuracy, "test_loss": loss}]
    metrics = {"auc": accuracy, "positive": None, "confusion": [[1]]}
    final = {
        "test_accuracy": accuracy,
        "test_loss": loss,
        "test_rows": 5,
        "model_sha256": "0",
        "metrics": metrics,
    }
    return {"start": start, "rounds": rounds, "final": final}


def test_a_figure_that_one_seed_lacks_has_no_mean(tmp_path: Path) -> None:
    reports = {
        "0.1-7": report(0.8, 0.5), "0.1-8": report(0.9, 0.7), "9-7": report(0.1, None), "9-8": report(0.3, 5.0)
    }  # fmt: skip
    document = sweep.write(tmp_path, PLAN, reports)
    assert document == json.loads((tmp_path / "sweep.json").read_text())
    assert document["figures"] == ["test_accuracy", "test_loss", "auc"]
    good, diverged = (row["figures"] for row in document["rows"])
    assert good["test_accuracy"]["mean"] == pytest.approx(0.85)
    assert good["test_accuracy"]["std"] == pytest.approx(0.1 / 2**0.5)
    assert diverged["test_loss"] == {
        "mean": None,
        "std": None,
        "low": None,
        "high": None,
        "n": 1,
        "values": [None, 5.0],
    }
    assert diverged["auc"]["mean"] == pytest.approx(0.2)
    line = list(csv.DictReader((tmp_path / "sweep.csv").open(newline="")))[1]
    assert (line["local.lr"], line["seeds"], line["test_loss_mean"], line["test_loss_n"]) == (
        "9",
        "2",
        "",
        "1",
    )
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_interval_is_students() -> None:
    values = [0.81, 0.84, 0.9, 0.86]
    from scipy import stats  # takes seconds

    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert sweep.confidence_interval(values) == pytest.approx((expected.low, expected.high))
    assert sweep.confidence_interval(values[:1]) == (None, None)
