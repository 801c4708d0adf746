"""A wrong job file is refused with its place, key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import job as jobs
from models.compress.quantization import quantize
from models.job import JobError
from models.pretrain import training

MODEL = {"name": "logreg", "input_shape": [4], "classes": 3}


def job_of(folder: Path, **settings: Any) -> jobs.JobFile:
    path = folder / "job.json"
    path.write_text(json.dumps({"model": MODEL, "arrays": ".", **settings}))
    return jobs.read(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, r"options.epochs is 0, expected a whole number from 1"),
        ({"epochs": 1.5}, r"options.epochs is 1.5, expected a whole number"),
        ({"epochs": True}, r"options.epochs is True"),
        ({"lr": "fast"}, r"options.lr is 'fast', expected a number"),
        ({"lr": float("nan")}, r"options.lr is nan"),
        ({"optimizer": "adagrad"}, r"options.optimizer is 'adagrad', expected one of 'adamw', 'sgd'"),
        ({"epoch": 3}, r"unknown key 'epoch', did you mean 'epochs'\?; known: epochs"),
        ([], r"options is \[\], expected an object"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        job_of(tmp_path, options=options).options(training.TrainingOptions)


def test_options_not_given_have_their_defaults(tmp_path: Path) -> None:
    assert job_of(tmp_path, options={"lr": 1}).options(training.TrainingOptions) == training.TrainingOptions(
        lr=1
    )
    assert job_of(tmp_path).options(quantize.QuantizeOptions) == quantize.QuantizeOptions()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": 0}, "model.classes is 0, expected a whole number"),
        ({"input_shape": 4}, "model.input_shape is 4, expected a list"),
        ({"name": None}, "model.name is None"),
        ({"input_dtype": "int64"}, "model.input_dtype is 'int64', expected float32 or int32"),
        ({"size": 3}, "model has the unknown key 'size'"),
    ],
)
def test_a_wrong_model_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job_of(tmp_path, model={**MODEL, **change}).spec()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((5, 3), np.float32), r"is \(5, 3\), expected \(rows, 4\)"),
        (np.zeros((0, 4), np.float32), r"at least one row"),
        (np.full((2, 4), np.nan, np.float32), "NaN"),
        (np.array([object()], dtype=object), "without pickled objects"),
    ],
)
def test_wrong_examples_are_named(tmp_path: Path, x: np.ndarray, message: str) -> None:
    np.save(tmp_path / "x_train.npy", x)
    job = job_of(tmp_path)
    with pytest.raises(JobError, match=message):
        job.rows("x_train", job.spec())


@pytest.mark.parametrize("y", [np.array([0, 3]), np.array([-2, 0]), np.array([0.0, 1.0]), np.array([0])])
def test_wrong_labels_are_named(tmp_path: Path, y: np.ndarray) -> None:
    np.save(tmp_path / "y_train.npy", y)
    job = job_of(tmp_path)
    with pytest.raises(JobError, match=r"y_train\.npy"):
        job.labels("y_train", job.spec(), np.zeros((2, 4), np.float32))


def test_a_missing_array_and_a_missing_key_are_named(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with pytest.raises(JobError, match=r"x_test\.npy does not exist"):
        job.rows("x_test", job.spec())
    with pytest.raises(JobError, match=r"teacher is missing"):
        job.value("teacher", "params")


@pytest.mark.parametrize("text", ["[]", "{", "\x80"])
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(JobError, match=r"job\.json"):
        jobs.read(path)


def test_writing_replaces_a_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    for number in (1, 2):
        jobs.write_result(tmp_path, {"number": number})
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text()) == {"number": 2}
