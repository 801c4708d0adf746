"""A user's own table: four hospitals of uneven size, numbers and words, commas inside quotes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli import assert_refused, options, report_of, run_cli, run_here

pytestmark = pytest.mark.slow

COLUMNS = ["age", "pressure", "ward", "smoker", "hospital", "y"]
HOSPITALS = {"Charité, Berlin": 240, "St. Mary's": 130, "Großhadern": 70, 'The "Old" Clinic': 35}
WARDS = ["cardiology, north wing", "surgery", "intensive care"]


def settings(path: Path) -> list[str]:
    return [
        "data.dataset=csv",
        f"data.path={path}",
        "data.label=y",
        "data.site=hospital",
        "data.partition=natural",
        "model.name=logreg",
        "local.steps=100",
    ]


def rows() -> list[list[str]]:
    """Whether a patient recovers depends on age, ward and smoking; each hospital measures pressure in its own unit."""
    rng = np.random.default_rng(3)
    found = []
    for index, (hospital, count) in enumerate(HOSPITALS.items()):
        for _ in range(count):
            age, pressure = rng.normal(55, 15), rng.normal(120, 20) * (1 + index)
            ward, smoker = int(rng.integers(3)), rng.random() < 0.4
            risk = (age - 55) / 15 + [1.5, -1.5, 0.0][ward] + (1.0 if smoker else -1.0)
            label = "died" if risk + rng.normal(0, 0.4) > 0.8 else "recovered"
            found.append(
                [
                    f"{age:.1f}",
                    f"{pressure:.0f}",
                    WARDS[ward],
                    "yes" if smoker else "no",
                    hospital,
                    label,
                ]
            )
    rng.shuffle(found)
    return found


def write(path: Path, table: list[list[str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *table])
    return path


@pytest.mark.extended
def test_hospitals_learn_together_from_a_table(tmp_path: Path) -> None:
    table = rows()
    path = write(tmp_path / "patients.csv", table)
    assert '"cardiology, north wing"' in path.read_text("utf-8")
    done = run_cli("simulate", "--out", "run", *options(settings(path)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    report = report_of(tmp_path / "run")
    most_common = Counter(row[-1] for row in table).most_common(1)[0][1] / len(table)
    assert report["final"]["test_accuracy"] >= most_common + 0.15
    assert report["runtimes"] == {"litert": 2, "torch": 2}
    assert report["clients"] == 4

    sites = report["per_site"]
    assert sites.keys() == HOSPITALS.keys()
    for name, count in HOSPITALS.items():
        assert sites[name]["test_rows"] == pytest.approx(0.2 * count, abs=1)
        assert sites[name]["test_accuracy"] > most_common
    pooled = sum(site["test_rows"] * site["test_accuracy"] for site in sites.values())
    assert pooled / report["final"]["test_rows"] == pytest.approx(report["final"]["test_accuracy"])

    metrics, baselines = report["final"]["metrics"], report["final"]["baselines"]
    assert metrics["positive"] == "recovered"
    assert metrics["auc"] > 0.9
    assert sum(map(sum, metrics["confusion"])) == report["final"]["test_rows"]
    summed = np.sum([site["metrics"]["confusion"] for site in sites.values()], axis=0)
    assert summed.tolist() == metrics["confusion"]
    majority, alone = baselines["majority"]["test_accuracy"], baselines["local"]["test_accuracy"]
    assert majority < alone
    assert all(site["baselines"].keys() == {"majority", "local"} for site in sites.values())
    assert f"majority class {majority:.4f}, trained alone {alone:.4f}" in done.stdout


def _without_site(text: list[str]) -> None:
    text[17] = "50,120,surgery,no,,died"


def _open_quote(text: list[str]) -> None:
    text[17] = "50,120,\"surgery,no,St. Mary's,died"


# More of them: tests/models/test_datasets_csv.py.
BROKEN: dict[Callable[[list[str]], None], list[str]] = {
    _without_site: ["line 18", "'hospital'"],
    _open_quote: ["line 18", "quote"],
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_table_is_refused_by_line_and_column(
    tmp_path: Path, broken: Callable[[list[str]], None]
) -> None:
    path = write(tmp_path / "patients.csv", rows())
    text = path.read_text("utf-8").splitlines()
    broken(text)
    path.write_text("\n".join(text) + "\n", "utf-8")
    done = run_here("simulate", "--out", "run", *options(settings(path)), cwd=tmp_path)
    assert_refused(done, str(path), *BROKEN[broken])


def test_a_column_that_is_not_there_is_reported_with_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path / "patients.csv", rows())
    done = run_here(
        "simulate", "--out", "run", *options([*settings(path), "data.site=hospitl"]), cwd=tmp_path
    )
    assert_refused(done, str(path), "'hospitl'", "hospital")
