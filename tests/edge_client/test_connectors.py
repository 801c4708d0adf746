"""Connectors read local data into examples, leave it untouched, and say in words what is wrong with it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from edge_client.data import (
    DataConfig,
    DataProblem,
    open_data,
)
from tests.support.training_jobs import install_plug_in

ROWS = 200


def a_table(rows: int = ROWS) -> list[tuple[float, float, str]]:
    rng = np.random.default_rng(1)
    return [
        (round(float(a), 3), round(float(b), 3), ("low", "high")[k])
        for a, b, k in zip(*rng.standard_normal((2, rows)), rng.integers(0, 2, rows), strict=True)
    ]


def write_csv(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def as_csv(folder: Path, rows: list[tuple[float, float, str]]) -> DataConfig:
    path = write_csv(folder / "t.csv", ["a,b,kind", *(f"{a},{b},{kind}" for a, b, kind in rows)])
    return DataConfig("csv", path, {"label": "kind", "classes": ["low", "high"]})


def as_parquet(folder: Path, rows: list[tuple[float, float, str]]) -> DataConfig:
    a, b, kind = zip(*rows, strict=True)
    pyarrow.parquet.write_table(pyarrow.table({"a": a, "b": b, "kind": kind}), folder / "t.parquet")
    return DataConfig("parquet", folder / "t.parquet", {"label": "kind", "classes": ["low", "high"]})


def as_sqlite(folder: Path, rows: list[tuple[float, float, str]]) -> DataConfig:
    with sqlite3.connect(folder / "t.db") as connection:
        connection.execute("DROP TABLE IF EXISTS t")
        connection.execute("CREATE TABLE t (a REAL, b REAL, kind TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
    connection.close()
    options = {"query": "SELECT a, b, kind FROM t", "label": "kind", "classes": ["low", "high"]}
    return DataConfig("sqlite", folder / "t.db", options)


def as_numpy(folder: Path, rows: list[tuple[float, float, str]]) -> DataConfig:
    x = np.asarray([row[:2] for row in rows], np.float32)
    np.savez(folder / "t.npz", x=x, y=np.asarray([("low", "high").index(row[2]) for row in rows]))
    return DataConfig("numpy", folder / "t.npz", {"classes": ["low", "high"]})


@pytest.mark.parametrize("kind", ["csv", "sqlite"])
def test_the_preview_tells_what_columns_hold_where_the_file_does_not(kind: str, tmp_path: Path) -> None:
    columns = ("count", "height", "member", "born", "city", "none", "label")
    rows = [
        (1, 1.5, "true", "2020-01-02", "Bonn", None, "low"),
        (2, None, "false", "2021-02-03", "Ulm", None, "high"),
        (3, 4.25, "true", "2022-03-04", None, None, "low"),
    ]
    if kind == "csv":
        lines = [",".join("" if cell is None else str(cell) for cell in row) for row in rows]
        path = write_csv(tmp_path / "t.csv", [",".join(columns), *lines])
    else:
        path = tmp_path / "t.db"
        with sqlite3.connect(path) as connection:
            connection.execute(f"CREATE TABLE t ({', '.join(columns)})")
            connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        connection.close()
    options: dict[str, Any] = {"label": "label", "classes": ["low", "high"], "standardise": "local"}
    options |= {"features": ["count", "height"], **({"query": "SELECT * FROM t"} if kind == "sqlite" else {})}

    schema = dict(open_data(DataConfig(kind, path, options)).preview().schema)

    assert schema == {
        "count": "whole numbers",
        "height": "numbers, with gaps",
        "member": "true or false",
        "born": "dates",
        "city": "text, with gaps",
        "none": "empty",
        "label": "text",
    }


Writer = Callable[[Path, list[tuple[float, float, str]]], DataConfig]
WRITERS = [as_csv, as_parquet, as_sqlite, as_numpy]


@pytest.mark.parametrize("write", WRITERS)
class TestEveryKindOfTable:
    def test_all_rows_are_read_as_they_are(self, tmp_path: Path, write: Writer) -> None:
        table = a_table()
        config = write(tmp_path, table)
        full = open_data(DataConfig(config.kind, config.path, {**config.options, "held_out": 0})).train()

        assert full.x.dtype == np.float32 and full.y.dtype == np.int32 and full.x.flags.c_contiguous
        np.testing.assert_array_equal(full.x, np.asarray([row[:2] for row in table], np.float32))
        assert full.y.tolist() == [("low", "high").index(row[2]) for row in table]

    def test_kinds_hold_out_the_same_rows_of_the_same_data(self, tmp_path: Path, write: Writer) -> None:
        expected = open_data(as_csv(tmp_path, a_table())).held_out()

        found = open_data(write(tmp_path, a_table())).held_out()

        assert 0.1 * ROWS < len(found) < 0.3 * ROWS
        np.testing.assert_array_equal(found.x, expected.x)
        np.testing.assert_array_equal(found.y, expected.y)

    def test_rows_that_are_added_move_no_other_row(self, tmp_path: Path, write: Writer) -> None:
        before = open_data(write(tmp_path, a_table()[:ROWS]))
        held, kept = as_set(before.held_out().x), as_set(before.train().x)

        after = open_data(write(tmp_path, a_table(ROWS + 50)[::-1] + a_table()))

        assert held <= as_set(after.held_out().x) and kept <= as_set(after.train().x)
        assert not as_set(after.held_out().x) & as_set(after.train().x)

    def test_the_preview_counts_and_names(self, tmp_path: Path, write: Writer) -> None:
        connector = open_data(write(tmp_path, a_table()))

        preview = connector.preview()

        assert preview.rows == len(connector.train()) and preview.held_out == len(connector.held_out())
        assert preview.rows + preview.held_out == ROWS
        assert (preview.input_shape, preview.input_dtype, preview.label_shape) == ((2,), "float32", ())
        assert preview.labels == {name: sum(row[2] == name for row in a_table()) for name in ("low", "high")}
        assert json.loads(json.dumps(asdict(preview)))["rows"] == preview.rows

    def test_reading_changes_nothing(self, tmp_path: Path, write: Writer) -> None:
        config = write(tmp_path, a_table())
        assert config.path is not None
        config.path.chmod(0o400)
        before = {path: digest(path) for path in tmp_path.iterdir()}

        open_data(config).train()

        assert {path: digest(path) for path in tmp_path.iterdir()} == before

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path, write: Writer) -> None:
        config = write(tmp_path, a_table())
        assert config.path is not None
        config.path.unlink()

        with pytest.raises(DataProblem, match=f"{config.path}: no such file"):
            open_data(config).train()

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path, write: Writer) -> None:
        config = write(tmp_path, a_table())
        assert config.path is not None
        config.path.write_bytes(b"\x89\xff no such thing\n" * 9)

        with pytest.raises(DataProblem, match=str(config.path)):
            open_data(config).train()

    def test_an_option_that_is_misspelt_is_refused(self, tmp_path: Path, write: Writer) -> None:
        config = write(tmp_path, a_table())

        with pytest.raises(DataProblem, match=r"has no option 'held_oat', did you mean 'held_out'\?"):
            open_data(DataConfig(config.kind, config.path, {**config.options, "held_oat": 0.1}))


@pytest.mark.parametrize("write", WRITERS)
def test_local_standardisation_knows_the_training_rows_only(tmp_path: Path, write: Writer) -> None:
    config = write(tmp_path, a_table())
    plain = open_data(config)
    scaled = open_data(DataConfig(config.kind, config.path, {**config.options, "standardise": "local"}))
    mean, deviation = plain.train().x.mean(axis=0), plain.train().x.std(axis=0)

    np.testing.assert_allclose(scaled.train().x, (plain.train().x - mean) / deviation, atol=1e-5)
    np.testing.assert_allclose(scaled.held_out().x, (plain.held_out().x - mean) / deviation, atol=1e-5)


def csv_of(folder: Path, *lines: str, **options: Any) -> DataConfig:
    return DataConfig("csv", write_csv(folder / "t.csv", list(lines)), {"label": "y", **options})


def test_a_csv_is_read_by_the_block_whatever_its_length(tmp_path: Path) -> None:
    lines = [f"{i},{i % 7}" for i in range(10_000)]

    full = open_data(csv_of(tmp_path, "a,y", *lines, held_out=0.0)).train()

    assert full.x[:, 0].tolist() == list(range(10_000))
    assert full.y.tolist() == [i % 7 for i in range(10_000)]


def test_semicolons_quotes_and_marks_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes('\ufeffa;"the; label"\r\n"1.5";0\r\n\r\n-2;1\r\n'.encode())

    found = open_data(DataConfig("csv", path, {"label": "the; label", "held_out": 0.0})).train()

    assert found.x.tolist() == [[1.5], [-2.0]] and found.y.tolist() == [0, 1]


def test_a_split_column_decides_alone(tmp_path: Path) -> None:
    config = csv_of(tmp_path, "a,y,part", "1,0,train", "2,1,TEST", "3,1,train", split="part")

    connector = open_data(config)

    assert connector.train().x.tolist() == [[1.0], [3.0]]
    assert connector.held_out().x.tolist() == [[2.0]]


def test_a_second_file_can_hold_the_held_out_rows(tmp_path: Path) -> None:
    write_csv(tmp_path / "test.csv", ["a,y", "9,1"])

    connector = open_data(csv_of(tmp_path, "a,y", "1,0", "2,1", test_path="test.csv"))

    assert connector.train().x.tolist() == [[1.0], [2.0]]
    assert connector.held_out().x.tolist() == [[9.0]]


def test_features_shape_scale_and_dtype_are_as_configured(tmp_path: Path) -> None:
    lines = ["p0,p1,p2,p3,junk,y", "0,1,2,4,x,0"]
    features = {"features": ["p3", "p2", "p1", "p0"], "held_out": 0.0}

    grey = open_data(csv_of(tmp_path, *lines, shape=[2, 2], scale=0.25, **features)).train()
    ids = open_data(csv_of(tmp_path, *lines, dtype="int32", **features)).train()

    assert grey.x.tolist() == [[[1.0, 0.5], [0.25, 0.0]]]
    assert ids.x.dtype == np.int32 and ids.x.tolist() == [[4, 2, 1, 0]]


def test_a_gap_is_filled_only_where_columns_are_standardised(tmp_path: Path) -> None:
    lines = ["a,y", "1,0", ",1", "3,0"]

    filled = open_data(csv_of(tmp_path, *lines, standardise="local", held_out=0.0)).train()

    np.testing.assert_allclose(filled.x, [[-1.0], [0.0], [1.0]])
    with pytest.raises(DataProblem, match=r"t.csv, line 3, column 'a': no value there; fill it in"):
        open_data(csv_of(tmp_path, *lines)).train()


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["a,y", "1,0", "x,0"], {}, r"line 3, column 'a': 'x' is not a number; correct it"),
        (["a,y", "inf,0"], {}, r"line 2, column 'a': 'inf' is too large"),
        (["a,y", "1e39,0"], {}, r"line 2, column 'a': '1e39' is too large; expected at most 1e\+30"),
        (["a,y", "1.5,0"], {"dtype": "int32"}, r"line 2, column 'a': '1.5' is not a whole number"),
        (["a,y", "1,cat"], {}, r"line 2, column 'y': label 'cat' is no class index .* option classes"),
        (["a,y", "1,-1"], {}, r"line 2, column 'y': label '-1' is no class index"),
        (["a,y", "1,cow"], {"classes": ["cat", "dog"]}, r"label 'cow' is none of the option classes: cat, dog"),
        (["a,y", "1,"], {}, r"line 2, column 'y': the label is empty"),
        (["a,y", "1,0,7"], {}, r"line 2, column 3: '7' is beyond the last column, the row has 3 values for 2 columns"),
        (["a,a,y", "1,1,0"], {}, r"line 1: column name 'a' stands twice"),
        (["a,z", "1,0"], {}, r"no column 'y' for the label.*its columns: a, z"),
        (["a,y", '"1,0'], {}, r"line 2: value 1 opens a quote that is never closed"),
        (["a,y"], {}, r"has column names but no rows"),
        ([""], {}, r"is empty, expected a line of column names"),
        (["y", "0"], {}, r"no column is left for features"),
        (["a,y", "1,0"], {"features": ["y"]}, r"column 'y' is the label and cannot be a feature too"),
        (["a,y", "1,0"], {"shape": [3]}, r"an example has 1 values, option shape is \[3\]"),
        (["a,y,s", "1,0,dev"], {"split": "s"}, r"line 2, column 's': 'dev' is neither train nor test"),
        (["a,y", "1,0"], {"held_out": 1.0}, r"option held_out is 1.0, expected 0 or more and below 1"),
        (["a,y", "1,0"], {"held_out": 0.1, "split": "a"}, r"held_out and split contradict each other"),
        (["a,y", "1,0"], {"label": ""}, r"the option label is missing; its columns: a, y"),
        (["a,y", "1,0"], {"classes": ["a", "a"]}, r"classes names \['a'\] twice"),
        (["a,y", "1,0"], {"scale": "big"}, r"option scale is 'big', expected a number"),
        (["a,y", "c,0"], {"categories": {"a": ["d"]}}, r"line 2, column 'a': 'c' is none of the option categories: d"),
        (["a,y", "c,0"], {"categories": {"b": ["d"]}}, r"no column 'b' for the option categories"),
        (["a,y", "c,0"], {"categories": {"y": ["d"]}}, r"the option categories names 'y', which is no feature"),
        (["a,y", "c,0"], {"categories": {"a": ["d", "d"]}}, r"option categories of 'a' names \['d'\] twice"),
        (["a,y", "c,0"], {"categories": {"a": ["c"]}, "scale": 2.0}, r"scale is for numbers only"),
    ],
)  # fmt: skip
def test_a_problem_names_its_place(
    tmp_path: Path, lines: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataProblem, match=message):
        open_data(csv_of(tmp_path, *lines, **options)).train()


def test_a_parquet_column_may_hold_lists(tmp_path: Path) -> None:
    table = pyarrow.table({"pixels": [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]], "y": [1, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    options = {"label": "y", "shape": [2, 2], "held_out": 0.0}

    found = open_data(DataConfig("parquet", tmp_path / "t.parquet", options)).train()

    assert found.x.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] and found.y.tolist() == [1, 0]


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM t",
        "DROP TABLE t",
        "ATTACH '{other}' AS o",
        "PRAGMA query_only = 0",
        "SELECT a, kind FROM t; DELETE FROM t",
        "SELECT load_extension('x')",
    ],
)
def test_a_query_can_only_select(tmp_path: Path, query: str) -> None:
    config = as_sqlite(tmp_path, a_table())
    assert config.path is not None
    before = digest(config.path)
    options = {**config.options, "query": query.format(other=tmp_path / "other.db")}

    with pytest.raises(DataProblem, match="the query cannot be answered"):
        open_data(DataConfig("sqlite", config.path, options)).train()

    assert digest(config.path) == before and not (tmp_path / "other.db").exists()


def test_a_numpy_archive_can_say_what_is_held_out(tmp_path: Path) -> None:
    x, y = np.arange(8, dtype=np.float64).reshape(4, 2), np.asarray([0, 1, 0, 1])
    np.savez(tmp_path / "t.npz", x=x, y=y, x_test=x[:1] + 10, y_test=y[:1])

    connector = open_data(DataConfig("numpy", tmp_path / "t.npz"))

    np.testing.assert_array_equal(connector.train().x, x.astype(np.float32))
    assert connector.held_out().x.tolist() == [[10.0, 11.0]]


def test_two_npy_files_are_a_data_set(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.int64).reshape(3, 4))
    np.save(tmp_path / "y.npy", np.asarray([[1, 2, -1, -1]] * 3))

    found = open_data(DataConfig("numpy", tmp_path / "x.npy", {"labels": "y.npy", "held_out": 0.0})).train()

    assert found.x.dtype == np.int32 and found.x[2].tolist() == [8, 9, 10, 11]
    assert found.y.tolist() == [[1, 2, -1, -1]] * 3


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    np.save(tmp_path / "x.npy", np.asarray([[Trap(canary)]], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "t.npz", x=np.asarray([[Trap(canary)]], dtype=object), y=np.zeros(1, np.int32))
    np.save(tmp_path / "y.npy", np.zeros(1, np.int32))

    for config in (
        DataConfig("numpy", tmp_path / "t.npz"),
        DataConfig("numpy", tmp_path / "x.npy", {"labels": "y.npy"}),
    ):
        with pytest.raises(DataProblem, match="holds Python objects, which are never loaded"):
            open_data(config).train()
    assert not canary.exists()


class Trap:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2))}, "has no array 'y'; it has x"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2, int)}, r"x is \[3, 2\] and y \[2\], expected"),
        (
            {"x": np.asarray([[np.nan]]), "y": np.zeros(1, int)},
            r"x\[0, 0\] is nan, which is no finite float32",
        ),
        ({"x": np.asarray([["a"]]), "y": np.zeros(1, int)}, "x holds <U1, expected numbers"),
        ({"x": np.zeros((1, 1)), "y": np.asarray([-1])}, r"y\[0\] is -1, expected 0 to"),
        ({"x": np.zeros((1, 1)), "y": np.asarray(["cat"])}, r"y\[0\]: label 'cat' is no class index"),
    ],
)
def test_arrays_that_make_no_examples_are_refused(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "t.npz", **arrays)

    with pytest.raises(DataProblem, match=message):
        open_data(DataConfig("numpy", tmp_path / "t.npz")).train()


def image_folder(folder: Path) -> Path:
    rng = np.random.default_rng(2)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(20):
            pixels = rng.integers(0, 256, (6, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02}.png")
    (folder / "cat" / "notes.txt").write_text("not an image")
    return folder


def test_images_are_read_by_the_folder(tmp_path: Path) -> None:
    options = {"classes": ["dog", "cat"], "shape": [3, 6, 8], "held_out": 0.0}

    found = open_data(DataConfig("images", image_folder(tmp_path / "all"), options)).train()

    assert found.x.shape == (40, 3, 6, 8) and found.y.tolist() == [1] * 20 + [0] * 20
    first = np.asarray(Image.open(tmp_path / "all/cat/00.png"), np.float32).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(found.x[0], first, atol=1e-6)


def test_images_are_brought_to_the_size_and_held_out_like_rows(tmp_path: Path) -> None:
    options = {"classes": ["cat", "dog"], "shape": [4, 4]}

    connector = open_data(DataConfig("images", image_folder(tmp_path / "all"), options))

    assert connector.train().x.shape[1:] == (4, 4)
    assert len(connector.train()) + len(connector.held_out()) == 40 and len(connector.held_out()) > 0
    assert connector.train().x.min() >= 0 and connector.train().x.max() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": [4, 4]}, "all/cat: label 'cat' is no class index"),
        ({"shape": [4, 4], "classes": ["cat"]}, "all/dog: label 'dog' is none of the option classes: cat"),
        ({"classes": ["cat", "dog"]}, r"option shape is \[\], expected \[height, width\]"),
    ],
)
def test_images_that_are_not_as_described_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataProblem, match=message):
        open_data(DataConfig("images", image_folder(tmp_path / "all"), options)).train()


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "all")
    (folder / "dog" / "07.png").write_bytes((folder / "dog" / "07.png").read_bytes()[:60])

    with pytest.raises(
        DataProblem, match=r"dog/07.png: cannot be read as an image: .*; replace or remove it"
    ):
        open_data(DataConfig("images", folder, {"classes": ["cat", "dog"], "shape": [4, 4]})).train()


def test_an_installed_package_adds_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install_plug_in(tmp_path)))

    assert len(open_data(DataConfig("naughty", options={"does": "behave"})).train()) == 4
    with pytest.raises(DataProblem, match="connector naughty:connector: RuntimeError: as told"):
        open_data(DataConfig("naughty", options={"does": "fail"})).train()
    with pytest.raises(DataProblem, match="connector naughty:connector: KeyError: 'does'"):
        open_data(DataConfig("naughty"))


def test_a_kind_that_is_not_installed_is_refused() -> None:
    with pytest.raises(DataProblem, match="kind 'cvs' of data is unknown, did you mean 'csv'"):
        open_data(DataConfig("cvs"))


def test_a_single_row_is_trained_on(tmp_path: Path) -> None:
    """Whatever its hash: a device never holds out all it has."""
    for value in range(20):
        connector = open_data(csv_of(tmp_path, "a,y", f"{value},0"))
        assert (len(connector.train()), len(connector.held_out())) == (1, 0)


def as_set(x: Any) -> set[bytes]:
    return {row.tobytes() for row in x}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
