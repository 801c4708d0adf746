"""Federated statistics: in simulation they equal those of the pooled rows, and the command shows them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from coordinator.reports.statistics import make_report, stability_index
from edge_client.data.statistics import moments
from edge_client.wire.statistics import ColumnStatistics, StatisticsResult
from tests.support.cli import assert_refused, run_here

SITES = {"north": 300, "south": 150, "east": 60, "tiny": 9}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """`age` is higher at every next site; the ward `unique-N` is of one row."""
    rng = np.random.default_rng(5)
    rows = []
    for index, (site, count) in enumerate(SITES.items()):
        for number in range(count):
            age = "" if rng.random() < 0.1 else f"{rng.normal(40 + 10 * index, 5):.3f}"
            ward = f"unique-{index}" if number == 0 else ["icu", "er"][rng.integers(2)]
            rows.append(
                [age, ward, site, "test" if number % 5 == 1 else "train", ["no", "yes"][rng.integers(2)]]
            )
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["age", "ward", "site", "split", "y"], *rows])
    return tmp_path / "t.csv"


def settings(path: Path) -> list[str]:
    values = ["data.dataset=csv", f"data.path={path}", "data.label=y", "data.partition=natural"]
    return [part for value in values for part in ("--set", value)]


def test_statistics_of_a_simulation_are_those_of_the_pooled_training_rows(
    table: Path, tmp_path: Path
) -> None:
    done = run_here("statistics", *settings(table), "--json", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "statistics.json").read_text()) == report

    rows = list(csv.DictReader(table.open()))
    told = [row for row in rows if row["split"] == "train" and row["site"] != "tiny"]
    ages = np.array([float(row["age"]) for row in told if row["age"]])
    pool = report["pooled"]
    assert pool["rows"] == len(told)
    age = pool["columns"]["age"]
    assert age["count"] == len(ages)
    assert age["mean"] == pytest.approx(ages.mean(), rel=1e-9)
    assert age["deviation"] == pytest.approx(ages.std(), rel=1e-9)
    assert report["sites"]["tiny"]["rows"] is None
    assert set(report["sites"]) == set(SITES)
    south = [row for row in told if row["site"] == "south"]
    assert report["sites"]["south"]["columns"]["age"]["missing"] == pytest.approx(
        sum(not row["age"] for row in south) / len(south)
    )
    assert report["sites"]["east"]["columns"]["age"]["mean_difference"] > 1
    assert report["sites"]["east"]["columns"]["age"]["drift"] > 0.25 > report["sites"]["north"]["label_drift"]


def test_no_single_row_is_in_what_is_shown(table: Path) -> None:
    shown = (
        run_here("statistics", *settings(table)).stdout
        + run_here("statistics", *settings(table), "--json").stdout
    )
    assert "unique" not in shown
    ages = sorted(float(row["age"]) for row in csv.DictReader(table.open()) if row["age"])
    for extreme in (*ages[:3], *ages[-3:]):
        assert str(extreme) not in shown


def test_statistics_are_of_tables() -> None:
    assert_refused(run_here("statistics"), "data.dataset = 'digits'", "data.path")


def test_drift_is_none_between_equal_shares_and_grows() -> None:
    even = {"a": 0.5, "b": 0.5}
    assert stability_index(even, even, 0.01) == 0
    near, far = (
        stability_index({"a": 0.6, "b": 0.4}, even, 0.01),
        stability_index({"a": 0.95, "b": 0.05}, even, 0.01),
    )
    assert 0 < near < 0.1 < 0.25 < far


def test_a_column_of_another_kind_at_one_site_is_said_to_have_no_drift() -> None:
    numbers = StatisticsResult(
        20, 10, {"a": ColumnStatistics("number", 20, mean=1.0, squares=4.0)}, {"0": 20}
    )
    texts = StatisticsResult(20, 10, {"a": ColumnStatistics("category", 20, categories={"n": 20})}, {"0": 20})
    report = make_report({"a": numbers, "b": numbers, "c": texts}, {"d": "forbidden"})
    assert report["pooled"]["columns"]["a"]["count"] == 40
    assert report["sites"]["c"]["columns"]["a"]["drift"] is None
    assert report["silent"] == {"d": "forbidden"}
    assert moments(numbers)["a"] == (20, 1.0, pytest.approx(0.2**0.5))
