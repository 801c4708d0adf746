"""The Python API: objects as model and data, what a result offers, and what is refused."""

from __future__ import annotations

import stat
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import nn

import fedloop
from coordinator.output_folders import default_folder
from coordinator.reports.progress import Quiet
from coordinator.rounds.records import RoundRecord
from edge_client.data.quoting import content_hidden
from models.datasets import DataError, load, own

EXPERIMENT: dict[str, Any] = {
    "data": {"partition": "iid"},
    "federation": {"clients": 2, "rounds": 3, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1},
    "simulation": {"workers": 1},
}


def readings() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 80)
    return {"x": rng.normal(size=(80, 3)) + 2 * y[:, None], "y": y, "class_names": ["well", "ill"]}


class Stops(Quiet):
    """Interrupts the run after its first round."""

    def __init__(self, rows: list[Path], out: Path) -> None:
        self._rows, self._out = rows, out

    def round(self, record: RoundRecord) -> None:
        self._rows.append(self._out / "work" / "data.npz")
        raise KeyboardInterrupt


@pytest.mark.extended
@pytest.mark.slow
def test_an_interrupted_run_of_objects_goes_on_to_the_same_result(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    whole = fedloop.simulate(EXPERIMENT, model=model, data=readings, out=tmp_path / "whole")
    assert repr(whole).startswith(f"Result(out='{tmp_path}/whole', rounds=3, accuracy=0.")
    rows: list[Path] = []
    with pytest.raises(fedloop.RunInterrupted, match="--resume"):
        fedloop.simulate(
            EXPERIMENT,
            model=model,
            data=readings(),
            out=tmp_path / "cut",
            progress=Stops(rows, tmp_path / "cut"),
        )
    assert rows[0].is_file() and stat.S_IMODE(rows[0].parent.stat().st_mode) == 0o700
    resumed = fedloop.resume(tmp_path / "cut")
    assert not rows[0].exists()
    assert resumed.report["final"] == whole.report["final"]
    labels, probabilities = resumed.predict(readings()["x"])
    right = labels == np.array(["well", "ill"])[readings()["y"]]
    assert right.mean() == pytest.approx(resumed.accuracy, abs=0.25)
    assert probabilities.shape == (80, 2) and np.allclose(probabilities.sum(axis=1), 1)
    assert resumed.predict([0.0, 0.0, 0.0]).labels.shape == (1,)
    with pytest.raises(fedloop.UserError, match=r"x has shape \[80, 2\], expected \[rows, 3\]"):
        resumed.predict(readings()["x"][:, :2])
    assert len(resumed.plot().axes) == 2


@pytest.mark.slow
def test_a_quantity_is_predicted_in_its_own_unit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    y = 500 + 40 * x[:, 0]
    experiment = {**EXPERIMENT, "local": {"epochs": 5, "lr": 0.1}}
    data = {"x": x, "y": y, "task": "regression"}
    found = fedloop.simulate(experiment, model="logreg", data=data, out=tmp_path / "run")
    assert found.accuracy is None and ", loss=0." in repr(found)
    values, probabilities = found.predict(x)
    assert probabilities is None and np.abs(values - y).mean() < 20
    diverged = fedloop.Result(
        found.out, found.report, {key: value * np.nan for key, value in found.params.items()}
    )
    with pytest.raises(
        fedloop.UserError, match="row 0: model 'logreg' answers with a number that is not finite"
    ):
        diverged.predict(x)
    assert len(found.plot().axes) == 2


def result(rounds: list[dict[str, Any]]) -> fedloop.Result:
    return fedloop.Result(Path("x"), {"rounds": rounds, "final": {"test_accuracy": 0.5}}, {})


def test_rounds_are_a_list_without_pandas_and_a_frame_with_it() -> None:
    rounds = [{"round": 1, "test_loss": 0.5}, {"round": 2, "test_loss": 0.25}]
    got = result(rounds).rounds
    if find_spec("pandas") is None:
        assert got == rounds
    else:
        assert list(got["test_loss"]) == [0.5, 0.25] and got.index.tolist() == [0, 1]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert fedloop.__version__ == version("fedloop")


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_folder("digits")
    first.mkdir(parents=True)
    first.with_name(first.name + "-2").mkdir()
    second = default_folder("digits")
    assert second != first and not second.exists()


def refused(**arguments: Any) -> str:
    with pytest.raises(fedloop.UserError) as raised:
        fedloop.simulate(out="never", **arguments)
    assert not Path("never").exists()
    return str(raised.value)


def test_objects_that_cannot_be_used_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = readings()["x"], readings()["y"]

    def fails(data_dir: Path | None) -> None:
        raise KeyError("rows")

    assert "model.name = 'cnn' and the argument `model` are both given" in refused(
        experiment={"model": {"name": "cnn"}}, model=nn.Linear(3, 2)
    )
    assert "data.path = 'a.csv' and the argument `data`" in refused(
        experiment={"data": {"path": "a.csv"}}, data={"x": x, "y": y}
    )
    assert "it is a lambda; define it with `def`" in refused(model=lambda: nn.Linear(3, 2))
    assert "returned no 'y'; it returned: x" in refused(data={"x": x})
    assert "key 'label'" in refused(data={"x": x, "y": y, "label": y})
    assert "x is a ragged list or holds objects" in refused(data={"x": x.astype(object), "y": y})
    assert refused(data={"x": x[:, :0], "y": y}) == (
        "data: x has shape (80, 0), expected at least one value in each row"
    )
    assert refused(data={"x": np.full_like(x, np.nan), "y": y}).startswith("data: x has a NaN")
    assert "it is a list, expected a mapping" in refused(data=[x, y])
    assert "fails failed at" in refused(data=fails)
    assert "model.name = 'cmn' is unknown, did you mean 'cnn'" in refused(model="cmn")


def test_an_archive_gives_back_all_that_a_loader_returned(tmp_path: Path) -> None:
    x: npt.NDArray[Any] = np.zeros((6, 2))
    given = {
        "x": x, "y": np.arange(6) % 3, "test": np.arange(6) < 2, "site": np.array(["a", "b"] * 3),
        "classes": 3, "class_names": ["p", "q", "r"], "task": "classification",
    }  # fmt: skip
    np.savez(tmp_path / "rows.npz", **own.archive(given, seed=7))
    data = load("npz", path=tmp_path / "rows.npz")
    assert (data.classes, data.class_names, data.site_names) == (3, ("p", "q", "r"), ("a", "b"))
    assert data.test.tolist() == [True, True, False, False, False, False]


def test_an_archive_is_not_quoted_where_content_is_hidden(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((4, 2)), y=np.array([0, 1, -77, 0]))
    with pytest.raises(DataError, match="y is -77 in row 2"):
        load("npz", path=tmp_path / "rows.npz")
    with content_hidden(), pytest.raises(DataError) as raised:
        load("npz", path=tmp_path / "rows.npz")
    assert "77" not in str(raised.value).replace(str(tmp_path), "")
    np.savez(tmp_path / "rows.npz", x=np.array([{"a": 1}], object), y=np.zeros(1))
    with pytest.raises(DataError, match="holds Python objects, which are never loaded"):
        load("npz", path=tmp_path / "rows.npz")
