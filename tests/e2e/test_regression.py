"""A table whose label is a quantity, from the command to the report."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics

from edge_client.train import torch_trainer
from edge_client.wire import arrays
from models import datasets, zoo
from tests.support.cli import options, report_of, run_cli

pytestmark = pytest.mark.slow


def test_sites_learn_to_predict_a_quantity(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(240, 3))
    price = 500 + 80 * (x @ [1.0, -0.5, 0.25]) + rng.normal(scale=10, size=240)
    with (tmp_path / "prices.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["a", "b", "c", "shop", "price"])
        table.writerows(
            [*row, f"shop {index % 3}", y] for index, (row, y) in enumerate(zip(x, price, strict=True))
        )
    settings = [
        "data.dataset=csv", "data.path=prices.csv", "data.label=price", "data.site=shop", "data.task=regression",
        "model.name=logreg", "federation.rounds=4", "simulation.workers=1",
    ]  # fmt: skip
    done = run_cli("simulate", "--out", "run", *options(settings), cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    report = report_of(tmp_path / "run")
    final, mean, deviation = report["final"], *report["data"]["label_scale"]
    assert (final["test_accuracy"], report["runtimes"]) == (None, {"torch": 3})
    assert final["metrics"]["r2"] > 0.9 > 0.1 > final["baselines"]["mean"]["r2"]
    assert final["baselines"].keys() == {"mean", "local"}
    assert f"R2 {final['metrics']['r2']:.4f}" in done.stdout

    rows = datasets.from_settings(report["experiment"]["data"], seed=7)
    spec = zoo.get("logreg", input_shape=(3,), classes=1, task="regression")
    runtime = torch_trainer.TorchRuntime(spec.build(0), spec.loss)
    outputs = runtime.logits(arrays.read(tmp_path / "run" / "model.safetensors"), rows.x[rows.test])[:, 0]
    predicted, real = outputs.astype(np.float64) * deviation + mean, price[rows.test]
    assert final["metrics"] == {
        "r2": pytest.approx(metrics.r2_score(real, predicted), rel=1e-5),
        "mae": pytest.approx(metrics.mean_absolute_error(real, predicted), rel=1e-5),
        "rmse": pytest.approx(metrics.root_mean_squared_error(real, predicted), rel=1e-5),
    }
