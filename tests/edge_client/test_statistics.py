"""Statistics of tables: those of sites merge to those of all rows, and no small count is in them."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.data import DataConfig, DataProblem, open_data
from edge_client.data.examples import NoExamples
from edge_client.data.options import TableOptions
from edge_client.data.statistics import bin_edges, disclosed, moments, of_records, pooled, read_statistics
from edge_client.data.table import Table
from edge_client.wire.statistics import (
    ColumnStatistics,
    StatisticsRequest,
    StatisticsResult,
    require_valid,
    require_valid_request,
)
from edge_client.wire.strict import InvalidDocument, parse_message

REQUEST = StatisticsRequest(minimum_count=3)
COLUMNS = ("a", "word", "label")

finite = st.floats(-1e9, 1e9, allow_nan=False, width=32)
cell = st.one_of(finite.map(repr), st.just(""))
row = st.tuples(cell, st.sampled_from(["x", "y", "z", "rare", ""]), st.sampled_from(["0", "1", "2"]))
sites = st.lists(st.lists(row, min_size=3, max_size=30), min_size=1, max_size=5)


def statistics(rows: Sequence[Sequence[str]], request: StatisticsRequest = REQUEST) -> StatisticsResult:
    records = list(enumerate(rows, 2))
    table = Table("t.csv", COLUMNS, (), records, "line", ",")
    options = TableOptions(label="label", features=("a", "word"), categories={"word": ()})
    result = of_records(table, records, options, request)
    # What travels is the same, and passes the checks of the coordinator.
    read = parse_message(StatisticsResult, json.loads(json.dumps(asdict(result))), "statistics")
    assert require_valid(read, request) == result
    return result


@settings(max_examples=60)
@given(sites)
def test_numbers_of_sites_merge_to_those_of_all_rows(tables: list[list[tuple[str, str, str]]]) -> None:
    merged = pooled(statistics(rows) for rows in tables).columns["a"]
    reporting = [rows for rows in tables if sum(bool(each[0]) for each in rows) >= REQUEST.minimum_count]
    values = np.array([float(each[0]) for rows in reporting for each in rows if each[0]], np.float64)
    assert merged.count == len(values)
    if len(values):
        scale = np.abs(values).max() + 1e-300
        assert merged.mean == pytest.approx(values.mean(), abs=1e-9 * scale)
        squares = ((values - values.mean()) ** 2).sum()
        assert merged.squares == pytest.approx(squares, rel=1e-9, abs=1e-9 * scale**2)


def test_a_large_mean_does_not_spoil_the_deviation() -> None:
    """Sums of squares would lose all digits here."""
    rng = np.random.default_rng(0)
    values = 1e9 + rng.normal(0, 1, 400)
    parts = [statistics([(repr(value), "x", "0") for value in part.tolist()]) for part in np.split(values, 4)]
    _, mean, spread = moments(pooled(parts))["a"]
    assert mean == pytest.approx(values.mean(), rel=1e-15)
    assert spread == pytest.approx(values.std(), rel=1e-6)


@settings(max_examples=100)
@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 30), max_size=12), st.integers(2, 10))
def test_no_small_count_is_reported_nor_left_over(counts: dict[str, int], least: int) -> None:
    shown, hidden = disclosed(counts, least)
    assert sum(shown.values()) + hidden == sum(counts.values())
    assert all(counts[name] == count >= least for name, count in shown.items())
    assert hidden == 0 or hidden >= least or not shown


@settings(max_examples=60)
@given(st.lists(row, min_size=3, max_size=40))
def test_nothing_reported_is_of_fewer_rows_than_the_minimum(rows: list[tuple[str, str, str]]) -> None:
    first = statistics(rows)
    result = statistics(rows, replace(REQUEST, edges=bin_edges(first, 4)))
    words = Counter(each[1] for each in rows)
    for word, count in result.columns["word"].categories.items():
        assert words[word] == count >= 3
    column, values = result.columns["a"], sorted(float(each[0]) for each in rows if each[0])
    assert all(count == 0 or count >= 3 for count in column.histogram)
    for bound in (column.low, column.high):
        if bound is not None:
            assert sum(value <= bound for value in values) >= 3
            assert sum(value >= bound for value in values) >= 3


def test_rare_texts_extremes_and_small_classes_are_nowhere_in_the_document() -> None:
    rng = np.random.default_rng(1)
    rows = [
        (f"{value:.6f}", "common" if index % 2 else "usual", "0")
        for index, value in enumerate(rng.normal(5, 1, 60))
    ]
    rows += [("-98765.25", "once-upon-a-time", "0"), ("43210.75", "common", "7"), ("5.5", "usual", "7")]
    request = StatisticsRequest()
    edges = bin_edges(statistics(rows, request), 10)
    text = json.dumps(asdict(statistics(rows, replace(request, edges=edges))))
    for secret in ("once-upon-a-time", "98765", "43210", '"7"'):
        assert secret not in text
    assert '"common": 31' in text


def test_a_lone_small_class_takes_the_next_with_it() -> None:
    """The rows and all other classes would give it away."""
    assert disclosed({"yes": 40, "no": 30, "rare": 2}, 10) == ({"yes": 40}, 32)
    assert disclosed({"yes": 40, "no": 12, "a": 6, "b": 5}, 10) == ({"yes": 40, "no": 12}, 11)


def test_of_few_rows_only_that_is_reported() -> None:
    assert statistics([("1", "x", "0")] * 2) == StatisticsResult(0, 3)
    alone = pooled([statistics([("1", "x", "0")] * 2), statistics([("2", "x", "0")] * 3)])
    assert (alone.rows, alone.columns["a"].mean) == (3, 2.0)


@pytest.fixture
def patients(tmp_path: Path) -> list[list[str]]:
    rng = np.random.default_rng(2)
    rows = [
        [
            f"{rng.normal(50, 9):.2f}",
            f"{rng.integers(2)}",
            ["icu", "er"][rng.integers(2)],
            "train" if index % 4 else "test",
        ]
        for index in range(200)
    ]
    with (tmp_path / "p.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["age", "label", "ward", "split"], *rows])
    with sqlite3.connect(tmp_path / "p.db") as database:
        database.execute("CREATE TABLE p (age REAL, label INTEGER, ward TEXT, split TEXT)")
        database.executemany("INSERT INTO p VALUES (?, ?, ?, ?)", rows)
    return rows


@pytest.mark.parametrize("kind", ["csv", "sqlite", "parquet"])
def test_a_device_reports_of_its_training_rows_in_every_kind_of_table(
    tmp_path: Path, patients: list[list[str]], kind: str
) -> None:
    path, options = tmp_path / "p.csv", {"label": "label", "split": "split"}
    if kind == "sqlite":
        path, options = tmp_path / "p.db", options | {"query": "SELECT * FROM p"}
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow.csv")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.read_csv(tmp_path / "p.csv"), tmp_path / "p.parquet")
        path = tmp_path / "p.parquet"
    result = read_statistics(DataConfig(kind, path, options), StatisticsRequest())
    trained = [each for each in patients if each[3] == "train"]
    ages = np.array([float(each[0]) for each in trained])
    assert result.rows == len(trained)
    assert moments(result)["age"] == (150, pytest.approx(ages.mean()), pytest.approx(ages.std()))
    assert result.columns["ward"].categories == dict(Counter(each[2] for each in trained).most_common())
    assert result.labels == dict(Counter(each[1] for each in trained).most_common())
    assert "split" not in result.columns


def test_the_training_rows_are_those_that_training_reads(tmp_path: Path, patients: list[list[str]]) -> None:
    options: dict[str, Any] = {"label": "label", "features": ["age"]}
    config = DataConfig("csv", tmp_path / "p.csv", options)
    trained = open_data(config).train()
    result = read_statistics(config, StatisticsRequest())
    assert result.rows == len(trained)
    assert moments(result)["age"][1] == pytest.approx(trained.x.astype(np.float64).mean(), rel=1e-6)
    words = {"label": "label", "categories": {"ward": ["icu", "er"]}, "features": ["ward", "age"]}
    config = DataConfig("csv", tmp_path / "p.csv", words)
    assert read_statistics(config, StatisticsRequest()).rows == len(open_data(config).train())


def test_a_quantity_is_a_column_of_numbers_over_the_rows_that_training_reads(
    tmp_path: Path, patients: list[list[str]]
) -> None:
    rng = np.random.default_rng(7)
    prices = [*rng.normal(200, 30, 58).round(3).tolist(), 98765.25, -4321.75]
    (tmp_path / "q.csv").write_text(
        "\n".join(["a;cost", *(f"{rng.integers(9)};{price}".replace(".", ",") for price in prices)])
    )
    config = DataConfig("csv", tmp_path / "q.csv", {"label": "cost"})  # called so at this device only
    asked = replace(REQUEST, label="price", quantity=True)
    first = read_statistics(config, asked)
    trained = open_data(replace(config, options={"label": "cost", "label_scale": [0.0, 1.0]})).train()
    own = trained.y.astype(np.float64)

    assert (first.rows, first.labels, first.other_labels) == (len(own), {}, len(own))
    assert set(first.columns) == {"a", "price"}
    assert moments(first)["price"] == (
        len(own),
        pytest.approx(own.mean(), rel=1e-6),
        pytest.approx(own.std(), rel=1e-6),
    )
    result = read_statistics(config, replace(asked, edges=bin_edges(first, 5)))
    assert require_valid(result, replace(asked, edges=bin_edges(first, 5))) == result
    histogram = result.columns["price"].histogram
    assert len(histogram) == 5 and all(count == 0 or count >= 3 for count in histogram)
    assert "98765" not in json.dumps(asdict(result)) and "4321" not in json.dumps(asdict(result))


def test_a_label_that_is_no_quantity_here_is_refused(tmp_path: Path, patients: list[list[str]]) -> None:
    asked = replace(REQUEST, label="ward", quantity=True)
    with pytest.raises(DataProblem, match="is no number"):
        read_statistics(DataConfig("csv", tmp_path / "p.csv"), asked)
    named = DataConfig("csv", tmp_path / "p.csv", {"label": "ward", "classes": ["er", "icu"]})
    with pytest.raises(DataProblem, match="option classes names classes of it"):
        read_statistics(named, asked)
    other = DataConfig("csv", tmp_path / "p.csv", {"label": "label"})
    with pytest.raises(
        DataProblem, match=r"the label is 'label' here, and column 'age'.* an input; exclude it"
    ):
        read_statistics(other, replace(asked, label="age"))


@pytest.mark.parametrize("quantity", [False, True])
def test_a_request_cannot_name_a_label_that_the_owner_keeps_back(
    tmp_path: Path, patients: list[list[str]], quantity: bool
) -> None:
    config = DataConfig("csv", tmp_path / "p.csv", {"exclude": ["age"], "split": "split"})
    with pytest.raises(DataProblem, match="option exclude keeps it back here"):
        read_statistics(config, replace(REQUEST, label="age", quantity=quantity))


@pytest.mark.parametrize("column", ["ward", "label", "split"])
def test_a_request_cannot_name_a_column_that_the_owner_keeps_back(tmp_path: Path, column: str) -> None:
    path = tmp_path / "t.csv"
    lines = (f"{row % 50},{'north' if row % 2 else 'south'},{row % 2},train" for row in range(60))
    path.write_text("\n".join(["age,ward,label,split", *lines]))
    options = {"label": "label", "split": "split", "exclude": ["ward"]}
    config = DataConfig("csv", path, options)
    assert set(read_statistics(config, REQUEST).columns) == {"age"}
    with pytest.raises(DataProblem, match=f"column '{column}' is no input of the data set"):
        read_statistics(config, replace(REQUEST, columns=("age", column)))


def test_a_table_whose_label_is_not_configured_has_columns_only(
    tmp_path: Path, patients: list[list[str]]
) -> None:
    result = read_statistics(DataConfig("csv", tmp_path / "p.csv", {"split": "split"}), StatisticsRequest())
    assert set(result.columns) == {"age", "label", "ward"}
    assert (result.labels, result.other_labels) == ({}, result.rows) == ({}, 150)


def test_values_that_are_no_table_or_no_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoExamples, match=r"csv, parquet, sqlite.*numpy"):
        read_statistics(DataConfig("numpy", tmp_path / "x.npz"), REQUEST)
    (tmp_path / "t.csv").write_text("a,label,split\n" + "1e31,0,train\n" * 12)
    with pytest.raises(DataProblem, match="too large"):
        read_statistics(DataConfig("csv", tmp_path / "t.csv", {"label": "label", "split": "split"}), REQUEST)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 2},
        {"minimum_count": 2},
        {"labels": {"0": 18, "1": 2}},
        {"labels": {"0": 17}, "other_labels": 2},
        {"columns": {"a": ColumnStatistics("number", 21, mean=0.0, squares=1.0)}},
        {"columns": {"a": ColumnStatistics("number", 20)}},
        {"columns": {"a": ColumnStatistics("number", 20, mean=1e200, squares=1.0)}},
        {"columns": {"a": ColumnStatistics("number", 20, mean=0.0, squares=1e300)}},
        {"columns": {"a": ColumnStatistics("number", 20, mean=0.0, squares=1.0, low=-1e300)}},
        {"rows": 2**60, "labels": {"0": 2**60}},
        {"columns": {"a": ColumnStatistics("number", 20, mean=0.0, squares=-1.0)}},
        {"columns": {"a": ColumnStatistics("number", 20, mean=0.0, squares=1.0, histogram=(18, 2))}},
        {"columns": {"a": ColumnStatistics("number", 20, mean=0.0, squares=1.0, histogram=(20,))}},
        {"columns": {"a": ColumnStatistics("category", 20, categories={"x": 18}, other=2)}},
    ],
)
def test_a_device_that_reports_small_counts_is_refused(wrong: dict[str, Any]) -> None:
    right = StatisticsResult(20, 3, labels={"0": 20})
    request = replace(REQUEST, edges={"a": (0.0,)})
    assert require_valid(right, request) == right
    with pytest.raises(InvalidDocument):
        require_valid(replace(right, **wrong), request)


@pytest.mark.parametrize(
    "wrong", [{"minimum_count": 1}, {"edges": {"a": (2.0, 1.0)}}, {"edges": {"a": (1.0, 1.0)}}]
)
def test_a_wrong_request_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocument):
        require_valid_request(replace(REQUEST, **wrong))
