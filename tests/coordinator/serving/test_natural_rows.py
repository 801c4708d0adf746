"""Rows in natural form: a table by its columns, and a quantity in its own unit, with the answers of `fedloop predict`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import run_here
from tests.support.serving import Server, serving

pytestmark = pytest.mark.slow

COLOURS = ("red", "green", "blue")


def write_table(path: Path, rows: int) -> list[dict[str, Any]]:
    """A table of a number with gaps, a number, a category, a class and a quantity that follow from them."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(rows):
        age, dose, colour = round(rng.normal(50, 10), 1), round(rng.random(), 3), COLOURS[rng.integers(3)]
        found.append(
            {
                "age": "" if rng.random() < 0.05 else age,
                "dose": dose,
                "colour": colour,
                "outcome": "ill" if age / 50 + dose + (colour == "red") > 2 else "well",
                "days": round(age / 2 + 10 * dose + 3 * (colour == "blue"), 2),
            }
        )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write_table(folder / "table.csv", 300)
    for label, other in (("outcome", "days"), ("days", "outcome")):
        options = {
            "data.dataset": "csv",
            "data.path": str(folder / "table.csv"),
            "data.label": label,
            "data.task": "classification" if label == "outcome" else "regression",
            "data.exclude": json.dumps([other]),
            "data.partition": "iid",
            "model.name": "logreg",
            "federation.clients": 3,
            "federation.rounds": 3,
            "federation.runtimes": "{torch=1.0}",
            "data.categories.minimum_count": 1,
        }
        sets = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
        done = run_here("simulate", *sets, "--out", str(folder / label))
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder / "home") as running:
        for label in ("outcome", "days"):
            running.deployed(label, folder / label)
        yield running


def columns(rows: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    """The inputs of a request: one for each column."""
    count = len(rows)
    numbers = {
        name: [float("nan") if each[name] == "" else float(each[name]) for each in rows]
        for name in ("age", "dose")
    }
    listed: dict[str, dict[str, Any]] = {
        name: {"name": name, "datatype": "FP64", "shape": [count, 1], "data": values}
        for name, values in numbers.items()
    }
    listed["colour"] = {
        "name": "colour",
        "datatype": "BYTES",
        "shape": [count],
        "data": [each["colour"] for each in rows],
    }
    return [each for name, each in (listed | changes).items() if each is not None]


def outputs_of(answer: Any) -> dict[str, Any]:
    return {each["name"]: each["data"] for each in answer["outputs"]}


@pytest.mark.parametrize("label", ["outcome", "days"])
def test_columns_are_answered_as_the_rows_of_a_file(server: Server, folder: Path, label: str) -> None:
    rows = [each for each in write_table(folder / "rows.csv", 40) if each["age"] != ""]
    with (folder / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["age", "dose", "colour"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    done = run_here("predict", str(folder / label), str(folder / "new.csv"), "--json")
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout)["predictions"]
    status, answer = server.call("POST", f"/v2/models/{label}/infer", {"inputs": columns(rows)})
    assert status == 200, answer
    found = outputs_of(answer)
    if label == "outcome":
        assert found["label"] == [each["class_name"] for each in expected]
    else:
        assert np.allclose(found["value"], [each["value"] for each in expected], rtol=1e-5)


def test_a_missing_number_is_a_row_as_in_a_file_and_a_new_category_is_refused(
    server: Server, folder: Path
) -> None:
    rows = write_table(folder / "rows.csv", 4)
    unknown = [{**each, "age": 50, "colour": "violet"} for each in rows]
    status, answer = server.call("POST", "/v2/models/outcome/infer", {"inputs": columns(unknown)})
    assert (status, answer["code"]) == (400, "wrong_row")
    assert "'violet' did not occur" in answer["error"]
    inputs = columns(rows)
    inputs[0] = {**inputs[0], "data": [None, *inputs[0]["data"][1:]]}
    status, answer = server.call("POST", "/v2/models/outcome/infer", {"inputs": inputs})
    assert (status, answer.get("code")) == (
        400,
        "wrong_datatype",
    )  # JSON has no number for "missing"; binary has NaN
    gap = np.array([np.nan, 50, 51, 52], "<f8")
    described = {
        "name": "age",
        "datatype": "FP64",
        "shape": [4],
        "parameters": {"binary_data_size": gap.nbytes},
    }
    head = json.dumps({"inputs": columns(rows, age=described)}).encode()
    status, answer = server.call(
        "POST",
        "/v2/models/outcome/infer",
        head + gap.tobytes(),
        **{"Inference-Header-Content-Length": str(len(head))},
    )
    assert status == 200, answer
    assert set(outputs_of(answer)["label"]) <= {"ill", "well"}


def test_columns_that_do_not_fit_are_refused(server: Server, folder: Path) -> None:
    rows = [each for each in write_table(folder / "rows.csv", 10) if each["age"] != ""]
    short = {"name": "dose", "datatype": "FP64", "shape": [1], "data": [0.5]}
    for inputs, code in (
        (columns(rows, dose=None), "unknown_input"),
        (columns(rows, dose=short), "wrong_shape"),
        (columns(rows, dose={**short, "shape": [1, 2], "data": [1.0, 2.0]}), "wrong_shape"),
        ([*columns(rows), {**short, "name": "days"}], "unknown_input"),
    ):
        status, error = server.call("POST", "/v2/models/outcome/infer", {"inputs": inputs})
        assert (status, error["code"]) == (400, code), error
