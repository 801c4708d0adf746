"""A user's own loader: their modules win over ours, and what they return is checked before it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.datasets import DataError, load

GOOD = """
import numpy as np
def load():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(20, 3)), "y": np.arange(20) % 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's working directory, forgotten again afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_wide_numbers_are_narrowed_and_a_fifth_held_out(folder: Path) -> None:
    (folder / "mine_plain.py").write_text(GOOD)
    data = load("mine_plain:load", seed=3)
    assert (data.x.dtype, data.y.dtype, data.x.shape, data.classes) == (np.float32, np.int32, (20, 3), 4)
    assert data.test.sum() == 4
    assert data.task == "classification"


def test_their_models_module_is_theirs_and_ours_comes_back(folder: Path) -> None:
    import models

    (folder / "models.py").write_text("ROWS = 12\n")
    (folder / "mine_named.py").write_text(
        "import models\nimport numpy as np\n"
        "def load():\n"
        "    import models as late\n"
        "    assert late is models or late.ROWS == 12\n"
        "    return {'x': np.zeros((models.ROWS, 2)), 'y': np.arange(models.ROWS) % 2}\n"
    )
    assert len(load("mine_named:load").x) == 12
    assert sys.modules["models"] is models


def test_seed_and_data_dir_are_passed_only_where_they_are_taken(folder: Path) -> None:
    (folder / "mine_args.py").write_text(
        "import numpy as np\n"
        "def data(rows): return {'x': np.zeros((rows, 2)), 'y': np.arange(rows) % 2}\n"
        "def with_seed(seed): return data(seed)\n"
        "def with_folder(*, data_dir): return data(len(data_dir.name))\n"
        "def with_any(**given): return data(10 * len(given))\n"
        "def with_path(path): return data(10)\n"
    )
    where = Path("/nowhere/twelve-chars")
    assert len(load("mine_args:with_seed", seed=17).x) == 17
    assert len(load("mine_args:with_folder", data_dir=where).x) == 12
    assert len(load("mine_args:with_any").x) == 20
    with pytest.raises(DataError, match=r"with_path\(\) missing 1 required positional argument: 'path'"):
        load("mine_args:with_path")


def test_a_failing_loader_is_reported_with_its_line(folder: Path) -> None:
    (folder / "mine_fails.py").write_text("def load():\n    return {}['images']\n")
    with pytest.raises(DataError, match=r"failed at .*mine_fails\.py, line 2: KeyError: 'images'"):
        load("mine_fails:load")


def test_unknown_module_or_function_is_reported(folder: Path) -> None:
    (folder / "mine_other.py").write_text("def read(): pass\n")
    with pytest.raises(DataError, match="no module 'mine_absent'"):
        load("mine_absent:load")
    with pytest.raises(DataError, match="no function 'load'; it has: read"):
        load("mine_other:load")


def returning(folder: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> str:
    """The name of a loader that returns `value`."""
    (folder / "mine_returns.py").write_text("VALUE = None\ndef load(): return VALUE\n")
    import importlib

    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(importlib.import_module("mine_returns"), "VALUE", value)
    return "mine_returns:load"


X = np.random.default_rng(0).normal(size=(10, 3))
Y = np.arange(10) % 2
TOKENS = np.arange(40).reshape(10, 4) % 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((X, Y), "returned tuple, expected a mapping"),
        (None, "returned NoneType, expected a mapping"),
        ({"x": X}, "returned no 'y'; it returned: x"),
        ({"x": X, "Y": Y}, "key 'Y', did you mean 'y'"),
        ({"x": X, "y": Y[:9]}, "y has 9 rows, x has 10"),
        ({"x": X, "y": Y.astype(float)}, "y is of type float64, expected whole numbers from 0"),
        ({"x": X, "y": np.array(["a", "b"] * 5)}, r"np.unique\(y, return_inverse=True\)"),
        ({"x": X, "y": Y[:, None]}, r"y has shape \(10, 1\), expected one label a row"),
        ({"x": X, "y": Y - 1}, "y is -1 in row 0; labels count from 0"),
        ({"x": X, "y": Y * 0}, "1 classes, expected a whole number from 2"),
        ({"x": X[:, 0], "y": Y}, r"x has shape \(10,\), expected rows and at least one more axis"),
        ({"x": np.where(np.arange(30).reshape(10, 3) == 13, np.nan, X), "y": Y}, "x has a NaN.* in row 4 "),
        ({"x": X * 1e300, "y": Y}, "beyond float32 in row 0"),
        ({"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}, "x cannot be made an array"),
        ({"x": X.astype(object), "y": Y}, "x is a ragged list or holds objects"),
        ({"x": X.astype(str), "y": Y}, "x is of type <U"),
        ({"x": X.astype(complex), "y": Y}, "x is of type complex128"),
        ({"x": X[:0], "y": Y[:0]}, "x has no rows"),
        ({"x": TOKENS - 1, "y": Y}, "x is -1 in row 0; token ids are 0 or more"),
        ({"x": TOKENS + 2**40, "y": Y}, "x is 1099511627776 in row 0"),
        ({"x": X, "y": Y, "test": Y}, r"test is int64 \(10,\), expected bool \(10,\)"),
        ({"x": X, "y": Y, "test": Y >= 0}, "10 of 10 rows are held out"),
        ({"x": X, "y": Y, "test": Y < 0}, "0 of 10 rows are held out"),
        ({"x": X, "y": Y, "x_test": X}, "only one of x_test and y_test"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:4]}, "y_test has 4 rows, x_test has 10"),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, r"x_test holds float32 rows of shape \(2,\)"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y, "site": Y}, "returned site beside x_test"),
        ({"x": X, "y": Y, "site": Y[:3]}, r"site is int64 \(3,\), expected a name or whole number"),
        ({"x": X, "y": Y, "classes": 1}, "1 classes, expected a whole number from 2"),
        ({"x": X, "y": Y + 1, "classes": 2}, "label or token 2 with 2 classes"),
        ({"x": X, "y": Y, "class_names": ["a"]}, "1 class_names|1 classes"),
        ({"x": X, "y": Y, "class_names": "ab"}, "class_names is 'ab', expected a list of texts"),
        (
            {"x": X, "y": Y, "task": "clustering"},
            "task is 'clustering', expected classification or next_token or regression",
        ),
        ({"x": X, "y": TOKENS[:, :3]}, "for next_token, x and y are whole numbers of one shape"),
        ({"x": TOKENS, "y": TOKENS, "task": "classification"}, r"y has shape \(10, 4\), expected \(10,\)"),
    ],
)
def test_a_wrong_return_is_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(returning(folder, monkeypatch, value))
    assert "mine_returns:load" in str(caught.value)


def test_everything_optional_is_taken_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {
        "x": X, "y": Y, "test": np.arange(10) < 3, "site": np.array(["b", "a"] * 5), "classes": 3,
        "class_names": ["none", "mild", "bad"], "task": "classification",
    }  # fmt: skip
    data = load(returning(folder, monkeypatch, value))
    assert data.test.tolist() == [True] * 3 + [False] * 7
    assert data.site is not None
    assert data.site.tolist() == [1, 0] * 5
    assert (data.site_names, data.classes, data.class_names) == (("a", "b"), 3, ("none", "mild", "bad"))


def test_separate_test_rows_follow_the_training_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load(returning(folder, monkeypatch, {"x": X, "y": Y, "x_test": X[:2], "y_test": Y[:2]}))
    assert data.test.tolist() == [False] * 10 + [True] * 2
    assert np.array_equal(data.x[10:], data.x[:2])


def test_tokens_with_a_label_each_are_next_token_and_may_be_padded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = TOKENS.copy()
    y[:, -1] = -1
    data = load(returning(folder, monkeypatch, {"x": TOKENS, "y": y}))
    assert (data.task, data.input_dtype, data.classes) == ("next_token", "int32", 7)


def test_bytes_are_numbers_and_no_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load(returning(folder, monkeypatch, {"x": TOKENS.astype(np.uint8), "y": Y}))
    assert data.input_dtype == "float32"
