"""The guides run as they are written."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.experiments import experiment
from coordinator.experiments.asynchrony import ASYNC_KEYS
from coordinator.experiments.schema import Experiment
from coordinator.experiments.strategy_choice import ADAMW_KEYS
from models import datasets
from models.datasets.names import KEYS
from tests.support.cli import run_cli

ROOT = Path(__file__).parents[2]
# Keys of the example that belong to another data set than the one it names.
OF_OTHERS = {*KEYS, "schema", "positive", "input_shape", "classes", "input_dtype"} - {"dataset"}

# Keys of a simulation that have no value by default.
UNSET = (
    "attack",
    "fine_tune",
    "stragglers",
    "names",
    "speed",
    "download",
    "upload",
    "availability",
    "availability_period_seconds",
    "profiles",
    "replay",
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


@pytest.mark.extended
@pytest.mark.slow
def test_the_guide_to_an_own_model_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(blocks("docs/own-model.md", "python")[0])
    command = shlex.split(blocks("docs/own-model.md", "sh")[0])
    assert command[:2] == ["fedloop", "simulate"]
    done = run_cli(*command[1:], "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.json").exists()


@pytest.mark.slow
def test_own_table_tutorial_runs(tmp_path: Path) -> None:
    """The commands run, the report of the table is the one shown, and the device reads its share of it."""
    page = "docs/own-table.md"
    (tmp_path / "table.py").write_text(blocks(page, "python")[0])
    for name, text in zip(("patients.toml", "edge.toml"), blocks(page, "toml"), strict=True):
        (tmp_path / name).write_text(text)
    simulate, predict, cut, preview = blocks(page, "sh")
    bin_folder = Path(sys.executable).parent
    script = f"set -e\nPATH={bin_folder}:$PATH\npython -P table.py\n{simulate}{predict}{cut}{preview}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first_lines, notes = blocks(page, "text")
    assert (tmp_path / "patients.csv").read_text("utf-8-sig").startswith(first_lines)
    printed = [line.strip() for line in done.stderr.replace(f"{tmp_path}/", "").splitlines()]
    assert [line for line in notes.splitlines() if line not in printed] == []
    report = json.loads((tmp_path / "runs" / "patients" / "report.json").read_text())
    assert report["final"]["test_accuracy"] > 0.9
    assert 'labels: {"benign": 93, "malignant": 50}' in done.stdout
    _compare_figures(tmp_path, report)


def _compare_figures(folder: Path, report: dict[str, Any]) -> None:
    """The figures of all clinics and of each are scikit-learn's of the held-out rows in `predictions.csv`."""
    # They take seconds, and `make check` has another test of this module.
    from sklearn import metrics
    from sklearn.calibration import calibration_curve
    from sklearn.dummy import DummyClassifier

    settings = experiment.load(folder / "patients.toml")
    dataset = datasets.from_settings(settings.data.model_dump(), seed=settings.data_seed)
    with (folder / "predictions.csv").open(newline="") as file:
        p = np.array([float(row["malignant"]) for row in csv.DictReader(file)])
    assert dataset.site is not None and dataset.site_names == ("east", "north", "south", "west")
    chosen = [(report["final"], np.ones(len(dataset.y), bool))]
    chosen += [(report["per_site"][name], dataset.site == at) for at, name in enumerate(dataset.site_names)]
    for reported, rows in chosen:
        held_out, got = rows & dataset.test, reported["metrics"]
        y, stated = dataset.y[held_out], p[held_out]
        assert reported["test_rows"] == len(y) and got["positive"] == "malignant"
        assert reported["test_accuracy"] == pytest.approx(metrics.accuracy_score(y, stated > 0.5))
        assert got["auc"] == pytest.approx(metrics.roc_auc_score(y, stated))
        assert got["sensitivity"] == pytest.approx(metrics.recall_score(y, stated > 0.5))
        assert got["confusion"] == metrics.confusion_matrix(y, stated > 0.5).tolist()
        observed, predicted = calibration_curve(y, stated, n_bins=10)
        assert [each["observed"] for each in got["calibration"]] == pytest.approx(observed.tolist())
        assert [each["predicted"] for each in got["calibration"]] == pytest.approx(predicted, rel=1e-4)
        train = dataset.y[rows & ~dataset.test]
        majority = DummyClassifier(strategy="most_frequent").fit(train[:, None], train)
        accuracy = pytest.approx(majority.score(y[:, None], y))
        assert reported["baselines"]["majority"] == {"class": "benign", "test_accuracy": accuracy}
    sites = report["per_site"].values()
    shares = [each["test_rows"] / report["final"]["test_rows"] for each in sites]
    # Each clinic's own model on its own rows: over all clinics they are the rows of all.
    for key in ("test_accuracy", "brier"):
        pooled = sum(
            share * each["baselines"]["local"][key] for share, each in zip(shares, sites, strict=True)
        )
        assert report["final"]["baselines"]["local"][key] == pytest.approx(pooled)


@pytest.mark.slow
def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    code = blocks("README.md", "python")[0]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    accuracy, shape = done.stdout.split(" ", 1)
    assert float(accuracy) > 0.5
    assert shape.strip() == "(10, 256)"


def test_the_reference_shows_every_key_with_its_default() -> None:
    """An experiment made of the reference's own values, less the keys of other data sets, is the default one."""
    document = tomllib.loads(blocks("docs/experiment.md", "toml")[0])
    sections = Experiment.model_fields
    for name, section in document.items():
        if isinstance(section, dict):
            fields = sections[name].annotation.model_fields  # type: ignore[union-attr]
            known = {field.alias or key for key, field in fields.items()} - {"steps"}  # or epochs
            assert known <= set(section), f"[{name}] in docs/experiment.md lacks {known - set(section)}"
    for key in OF_OTHERS:
        del document["data"][key]
    del document["model"]["init"], document["model"]["adapt"], document["model"]["register"]
    del document["federation"]["max_examples"], document["record"], document["evaluation"]
    del document["uplink"], document["downlink"], document["server_data"], document["privacy"]
    for key in UNSET:
        del document["simulation"][key]
    for key in (*ASYNC_KEYS, "malicious_relays"):
        del document["federation"][key]
    for key in ADAMW_KEYS:
        del document["local"][key]
    assert experiment.resolve(document, "docs/experiment.md") == experiment.resolve({}, "defaults")
