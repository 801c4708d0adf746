"""Rows that a person gives to a model: what is wrong with them is one message that names the file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data import DataConfig, DataProblem, open_data
from edge_client.data.contract import with_schema
from edge_client.infer import runtime
from edge_client.serving.data_set_file import read_as_data_set
from edge_client.serving.predict import predict
from edge_client.serving.rows import Reading, checked_arrays, read_inputs, read_rows
from edge_client.train.interpreter import NoRuntime
from edge_client.wire.schema import ColumnSchema, DataSchema
from tests.support import released

NAMES = ",".join(f"p{number}" for number in range(64))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> runtime.LoadedRelease:
    return runtime.load(released.release_folder(tmp_path_factory.mktemp("release"), 3))


def saved(x: Any) -> Callable[[Path], None]:
    return lambda path: np.save(path, x, allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.npy", saved(np.array([[0.0] * 64, [np.nan] * 64])), "row 1 holds a number that is not finite"),
        ("a.npy", saved(np.full((1, 64), 1e300)), "row 0 holds a number that is not finite, or too large"),
        ("a.npy", saved(np.zeros((0, 64))), "has no rows"),
        ("a.npy", saved(np.full((1, 64), "a")), "takes float32"),
        ("a.npy", saved(np.zeros((2, 3))), r"rows are \[3\], digits:3 takes \[64\]"),
        ("a.npy", lambda path: path.write_bytes(b"junk"), "is not a NumPy file of plain numbers$"),
        ("a.csv", lambda path: path.write_text(f"{NAMES}\n"), "has no rows"),
        (
            "a.csv",
            lambda path: path.write_text(f"{NAMES}\n" + ",".join(["nan"] * 64)),
            "line 2, column 'p0': 'nan' is not a number; exclude",
        ),
        ("a.csv", lambda path: path.write_text(""), "is empty, expected a line of column names"),
        ("a.txt", lambda path: path.write_text(""), "expected a file named .npy, .npz or .csv"),
    ],
)
def test_rows_that_no_model_could_take_are_one_message(
    model: runtime.LoadedRelease, tmp_path: Path, name: str, write: Callable[[Path], Any], message: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(DataProblem, match=message) as raised:
        read_rows(tmp_path / name, model.manifest)
    assert str(raised.value).startswith(f"{tmp_path / name}")


def test_quantities_of_minus_one_are_labels_and_empty_cells_are_none(tmp_path: Path) -> None:
    schema = DataSchema(
        "table",
        (1,),
        "float32",
        columns=(ColumnSchema("a"),),
        label="b",
        label_scale=(2.0, 3.0),
        scale="none",
    )
    config = DataConfig("csv", tmp_path / "t.csv", {})
    for cells, labels in ((["-1", "-1"], [-1.0, -1.0]), (["", ""], None)):
        (tmp_path / "t.csv").write_text(
            "\n".join(["a,b", *(f"{row},{cell}" for row, cell in enumerate(cells))])
        )
        for found in (
            read_inputs(tmp_path / "t.csv", schema, "prices"),
            read_as_data_set(tmp_path / "t.csv", with_schema(config, schema), Reading()),
        ):
            assert (None if found.y is None else found.y.tolist()) == labels


def test_columns_are_left_out_of_tables_only(model: runtime.LoadedRelease, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 64)))
    with pytest.raises(DataProblem, match=r"--leave-out is for \.csv"):
        read_rows(tmp_path / "a.npy", model.manifest, Reading(("label",)))


def test_an_answer_that_is_no_number_is_refused(model: runtime.LoadedRelease) -> None:
    with pytest.raises(runtime.InvalidRows, match="row 1: digits answers with a number that is not finite"):
        predict(model, np.stack([np.zeros(64), np.full(64, 3e38)]))


def test_a_machine_without_a_runtime_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = released.release_folder(tmp_path, 1)
    package = "ai_edge_litert" if runtime.RUNTIME == "litert" else "tflite_runtime"
    monkeypatch.setitem(sys.modules, f"{package}.interpreter", None)
    with pytest.raises(NoRuntime, match="pip install ai-edge-litert"):
        runtime.load(folder)


SHADES = "split;digit;" + NAMES.replace(",", ";") + "\n" + "train;3;" + ";".join(["8"] * 64) + "\n"


def test_a_file_is_read_by_the_options_of_a_data_set(model: runtime.LoadedRelease, tmp_path: Path) -> None:
    """A model of arrays does not know the scale of a table that devices hold; their data set does."""
    path = tmp_path / "digits.csv"
    path.write_text(SHADES, "utf-8")
    options = {"label": "digit", "shape": [64], "scale": 0.0625, "split": "split", "delimiter": ";"}
    config = DataConfig("csv", path, options)
    trained = open_data(config).train()
    unlabelled = tmp_path / "new.csv"
    unlabelled.write_text(f"{NAMES}\n" + ",".join(["8"] * 64) + "\n", "utf-8")

    known = checked_arrays(path, read_as_data_set(path, config, Reading()), model.manifest)
    new = checked_arrays(unlabelled, read_as_data_set(unlabelled, config, Reading()), model.manifest)

    assert known.y is not None and new.y is None
    np.testing.assert_array_equal(known.x, trained.x)
    np.testing.assert_array_equal(known.y, trained.y)
    np.testing.assert_array_equal(new.x, trained.x)
    assert trained.x.max() == 0.5


def test_arrays_are_scaled_as_a_data_set_of_arrays_is(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((2, 64), 8), y=[1, 2])
    config = DataConfig("numpy", tmp_path / "train.npz", {"scale": 0.0625})
    found = read_as_data_set(tmp_path / "a.npz", config, Reading())
    assert (found.x == 0.5).all() and found.y is not None and found.y.tolist() == [1, 2]
    with pytest.raises(DataProblem, match="the data set is of kind 'csv', expected a table"):
        read_as_data_set(tmp_path / "a.npz", DataConfig("csv", tmp_path / "t.csv", {}), Reading())
    with pytest.raises(DataProblem, match="No such file"):
        read_as_data_set(tmp_path / "b.csv", DataConfig("csv", tmp_path / "t.csv", {}), Reading())
