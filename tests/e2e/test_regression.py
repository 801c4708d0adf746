"""A table whose label is a quantity, from the command to the report."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics
from sklearn.datasets import load_diabetes

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.local_fleet import local_fleet
from edge_client.train import torch_trainer
from edge_client.wire import arrays
from edge_client.wire import schema as schemas
from edge_client.wire.schema import DataSchema
from models import datasets, zoo
from tests.support.cli import options, report_of, run_cli, run_here
from tests.support.long import LONG

pytestmark = pytest.mark.slow


@pytest.mark.long
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
        "model.name=logreg", "federation.rounds=4", "federation.keep=best", "federation.metric=r2", "simulation.workers=1",
    ]  # fmt: skip
    done = run_cli("simulate", "--out", "run", *options(settings), cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    report = report_of(tmp_path / "run")
    final, mean, deviation = report["final"], *report["data"]["label_scale"]
    assert (final["test_accuracy"], report["runtimes"]) == (None, {"torch": 3})
    scored = [row["test_metric"] for row in report["rounds"]]
    assert final["round"] == scored.index(max(scored)) + 1
    assert final["metrics"]["r2"] == max(scored)
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

    exported = run_cli("export", "run", "--name", "prices", "--out", "release", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert "prices:1, dynamic-int8" in exported.stdout and ", R2 0.9" in exported.stdout
    found = {}
    for model in ("run", "release"):
        out = tmp_path / f"{model}.csv"
        done = run_here("predict", tmp_path / model, tmp_path / "prices.csv", "--out", out)
        assert done.returncode == 0 and "MAE" in done.stderr, done.stderr
        found[model] = np.loadtxt(out, skiprows=1)
    assert f"R2 {metrics.r2_score(price, found['release']):.4f}" in done.stderr
    np.testing.assert_allclose(found["run"][rows.test], predicted, rtol=1e-5)
    assert np.abs(found["release"] - found["run"]).max() < 0.1 * deviation
    document = json.loads((tmp_path / "release" / "manifest.json").read_text("utf-8"))
    assert (document["task"], document["schema"]["label_scale"]) == ("regression", [mean, deviation])

    if LONG:
        pretrained_on_quantities(tmp_path, settings, real, rows.test)


def pretrained_on_quantities(tmp_path: Path, settings: list[str], real: Any, test: Any) -> None:
    keys = [each for each in settings if each.startswith(("data.", "model."))]
    training = options([*keys, "data.encoding=latin-1", "train.epochs=20", "train.lr=0.05"])
    done = run_cli("pretrain", *training, "--out", "pre", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pretrained = report_of(tmp_path / "pre")["final"]
    assert pretrained["test_accuracy"] is None and pretrained["metrics"]["r2"] > 0.9
    assert f"R2 {pretrained['metrics']['r2']:.4f}, MAE {pretrained['metrics']['mae']:.4g}" in done.stdout
    assert schema_of(tmp_path / "pre") == replace(schema_of(tmp_path / "run"), encoding="latin-1")
    out = tmp_path / "pre.csv"
    done = run_here("predict", tmp_path / "pre", tmp_path / "prices.csv", "--out", out)
    assert done.returncode == 0, done.stderr
    error = np.abs(np.loadtxt(out, skiprows=1)[test] - real).mean()
    assert error == pytest.approx(pretrained["metrics"]["mae"], rel=1e-5)


def schema_of(folder: Path) -> DataSchema:
    return schemas.from_json((folder / "schema.json").read_bytes())


def write_diabetes(path: Path, site: str | None = None) -> Path:
    """Rows of scikit-learn's diabetes data at two sites, or those of one, whose file does not name it."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            [*(f"x{column}" for column in range(10)), "progression", "split", *([] if site else ["site"])]
        )
        for row in range(440):
            own = "south" if row % 2 else "north"
            cells = [*x[row], y[row], "test" if row % 10 in (0, 1) else "train"]
            if site in (None, own):
                table.writerow([*cells, *([] if site else [own])])
    return path


@pytest.mark.extended
def test_devices_learn_to_predict_a_quantity_and_report_sums_of_its_errors(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    table = write_diabetes(tmp_path / "held" / "diabetes.csv")
    sets = [
        "data.dataset=csv", f"data.path={table}", "data.label=progression", "data.task=regression", "data.site=site",
        "model.name=logreg", "local.lr=0.1", "local.epochs=2", "federation.rounds=4", "federation.clients_per_round=2",
        "federation.min_updates=2", "devices.patience_seconds=600", "devices.evaluate_every=4", "federation.runtimes={litert=1, torch=1}",
    ]  # fmt: skip
    runtimes = {"north": "litert", "south": "torch"}
    with local_fleet(tmp_path / "fleet", ["--allow-path", str(tmp_path / "held")]) as fleet:
        for site in ("north", "south"):
            path = write_diabetes(tmp_path / f"{site}.csv", site)
            data = {name: {"kind": "csv", "path": str(path), "split": "split"} for name in ("csv", "private")}
            fleet.add(site, {"data": data, "labels": {"site": site}, "runtimes": [runtimes[site]]}).start()
        environment = {
            "FEDLOOP_COORDINATOR": fleet.operator_url,
            "FEDLOOP_ADMIN_TOKEN": str(read_admin_token(fleet.home)),
        }
        done = run_here("run", *options(sets), "--out", tmp_path / "run", env=environment)
        assert done.returncode == 0, done.stderr
        # The same without rows of the coordinator's own: the devices' statistics say what their tables hold.
        asked = options(["data.dataset=private", *sets[2:4], "devices.evaluate_seconds=600"])
        file = str(tmp_path / "schema.json")
        made = run_here("statistics", "--fleet", "--schema-out", file, *asked, env=environment)
        assert made.returncode == 0 and "--set data.task=regression" in made.stdout, made.stderr
        own = ("data.dataset=private", f"data.schema={file}", "data.task=regression")
        settings = [*own, *sets[5:], "federation.rounds=1", "devices.evaluate_every=1"]
        blind = run_here("run", *options(settings), "--out", tmp_path / "blind", env=environment)
        assert blind.returncode == 0, blind.stderr
    report = report_of(tmp_path / "run")
    final, pooled = report["final"], report["rounds"][-1]["on_devices"]
    assert [(each["accepted"], each["rejected"]) for each in report["rounds"]] == [(2, 0)] * 4
    assert (report["runtimes"], final["test_accuracy"], pooled["test_accuracy"]) == (
        {"litert": 1, "torch": 1},
        None,
        None,
    )
    assert final["metrics"]["r2"] > 0.35 > 0.1 > final["baselines"]["mean"]["r2"]
    # The devices hold the coordinator's held-out rows, and report sums only.
    assert (pooled["test_rows"], final["test_rows"]) == (88, 88)
    assert pooled["metrics"] == pytest.approx(final["metrics"], rel=1e-5)
    assert pooled["test_loss"] == pytest.approx(final["test_loss"], rel=1e-5)
    assert {name: each["test_rows"] for name, each in report["per_site"].items()} == {
        "north": 44,
        "south": 44,
    }
    assert report["per_site"]["north"]["metrics"]["r2"] != report["per_site"]["south"]["metrics"]["r2"]
    assert f"R2 {final['metrics']['r2']:.4f}" in done.stdout and "largest error of 2 sites" in done.stdout

    unseen = report_of(tmp_path / "blind")
    assert unseen["final"]["metrics"] == unseen["rounds"][-1]["on_devices"]["metrics"]
    assert unseen["final"]["test_accuracy"] is None and unseen["per_site"]["south"]["metrics"]["mae"] > 1
    assert unseen["data"]["label_scale"] == pytest.approx(report["data"]["label_scale"], rel=1e-6)
    assert f"R2 {unseen['final']['metrics']['r2']:.4f}" in blind.stdout
