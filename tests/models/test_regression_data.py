"""Labels that are quantities: read, standardised by the training rows, held out evenly, dealt out without classes."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from models import datasets
from models.datasets import Dataset
from models.zoo import ModelNotFound, find


def table(tmp_path: Path, *labels: object) -> Path:
    path = tmp_path / "table.csv"
    lines = [f"{index}.5,{label},{'ab'[index % 2]}" for index, label in enumerate(labels)]
    path.write_text("\n".join(["feature,price,shop", *lines]) + "\n")
    return path


def loaded(path: Path, **named: str) -> Dataset:
    return datasets.load("csv", path=path, label="price", task="regression", seed=3, **named)  # type: ignore[arg-type]


def test_quantities_are_standardised_by_the_training_rows(tmp_path: Path) -> None:
    prices = [float(10 + index % 7) for index in range(50)]
    found = loaded(table(tmp_path, *prices), site="shop")
    assert (found.task, found.classes, found.class_names, found.y.dtype) == ("regression", 1, (), np.float32)
    assert found.label_scale is not None
    mean, deviation = found.label_scale
    np.testing.assert_allclose(found.y * deviation + mean, prices, rtol=1e-6)
    train = found.y[~found.test]
    assert (train.mean(), train.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1))
    assert found.test.sum() == 10
    assert any("a quantity from 10 to 16" in line for line in datasets.preview(found, private=True))
    assert any("label: a quantity; training rows have" in line for line in datasets.preview(found))


@pytest.mark.parametrize("cell", ["", "cheap", "nan", "inf"])
def test_a_label_that_is_no_number_is_refused_by_its_line(tmp_path: Path, cell: str) -> None:
    path = table(tmp_path, *range(20), cell)
    with pytest.raises(datasets.DataError, match=r"table\.csv.*line 22.*price.*no number.*regression"):
        loaded(path)


def test_equal_quantities_are_refused(tmp_path: Path) -> None:
    with pytest.raises(datasets.DataError, match="every training label is 3"):
        loaded(table(tmp_path, *[3] * 20))


def test_a_table_of_quantities_says_how_to_predict_them(tmp_path: Path) -> None:
    path = table(tmp_path, *[index / 3 for index in range(20)])
    with pytest.raises(datasets.DataError, match=r'data\.task = "regression"'):
        datasets.load("csv", path=path, label="price")


def test_quantities_are_dealt_out_without_classes(tmp_path: Path) -> None:
    found = loaded(table(tmp_path, *range(40)), site="")
    parts = datasets.partition("iid", found, clients=4, seed=1)
    assert sorted(np.concatenate(parts)) == np.flatnonzero(~found.test).tolist()
    assert set(datasets.owners(found, parts, 1)) <= set(range(4))
    assert len(datasets.public_rows(found, 5, 1)) == 5
    with pytest.raises(datasets.DataError, match=r"dirichlet deals by class.*quantities; use iid or natural"):
        datasets.partition("dirichlet(0.3)", found, clients=4, seed=1)


LOADER = """
    import numpy as np

    def load():
        x = np.linspace(0, 1, 40).reshape(20, 2)
        return {"x": x, "y": x.sum(axis=1) * 10, "task": "regression"}

    def vectors():
        return {**load(), "y": np.zeros((20, 2))}

    def gaps():
        return {**load(), "y": np.full(20, np.nan)}

    def undeclared():
        return {key: value for key, value in load().items() if key != "task"}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "regression_loader.py").write_text(textwrap.dedent(LOADER))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "regression_loader", raising=False)
    return "regression_loader"


def test_an_own_loader_may_return_quantities(module: str) -> None:
    found = datasets.load(f"{module}:load", seed=1)
    assert (found.task, found.classes, found.y.dtype) == ("regression", 1, np.float32)
    assert found.y[~found.test].std() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("vectors", "one number a row"),
        ("gaps", "y is nan in row 0"),
        ("undeclared", "expected whole numbers"),
    ],
)
def test_wrong_quantities_of_an_own_loader_are_refused(module: str, function: str, message: str) -> None:
    with pytest.raises(datasets.DataError, match=message):
        datasets.load(f"{module}:{function}", seed=1)


def test_a_model_of_tokens_predicts_no_quantity() -> None:
    with pytest.raises(ModelNotFound, match="predicts tokens"):
        find("charlm", input_shape=(8,), classes=1, input_dtype="int32", task="regression")
