"""The data sets with names, from files: each trains above guessing in a few rounds, over LiteRT and PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models import datasets
from tests.support.cli import simulate
from tests.support.require import data_dir

pytestmark = pytest.mark.slow

FEDERATION = ("federation.runtimes={litert=1, torch=1}",)
FILES = {
    "mnist": "mnist10k-images-idx3-ubyte.gz",
    "shakespeare": "tinyshakespeare.txt",
    "phrasebank": "financial_phrasebank.csv",
}
# Transformers of one block and short texts, so that a round takes a second; plain SGD takes them this far.
SETTINGS = {
    "mnist": (
        "federation.clients=10",
        "federation.clients_per_round=4",
        "federation.rounds=3",
        "local.steps=20",
        "local.lr=0.1",
    ),
    "shakespeare": (
        "data.length=20",
        "model.layers=1",
        "federation.clients_per_round=8",
        "federation.rounds=3",
        "local.steps=20",
        "local.lr=0.5",
    ),
    "phrasebank": (
        "data.length=24",
        "data.vocab=1000",
        "data.partition=iid",
        "model.layers=1",
        "model.heads=1",
        "federation.clients=8",
        "federation.clients_per_round=4",
        "federation.rounds=6",
        "local.steps=30",
        "local.lr=0.3",
    ),
}
MARGIN = {"mnist": 0.3, "shakespeare": 0.03, "phrasebank": 0.02}


@pytest.mark.parametrize("name", ["shakespeare", "mnist", "phrasebank"])
@pytest.mark.extended
def test_a_named_data_set_trains_above_guessing(tmp_path: Path, name: str) -> None:
    folder = data_dir(FILES[name])
    dataset = datasets.load(name, data_dir=folder, seed=7)
    report = simulate(
        tmp_path / "run",
        [f"data.dataset={name}", *FEDERATION, *SETTINGS[name]],
        env={"FEDLOOP_DATA_DIR": str(folder)},
    )
    assert set(report["runtimes"]) == {"litert", "torch"}
    assert report["rejections"] == {}
    if name != "shakespeare":  # its rows depend on data.length
        assert report["final"]["test_rows"] == int(dataset.test.sum())
    labels = dataset.y[dataset.test]
    guessing = np.bincount(labels[labels >= 0]).max() / (labels >= 0).sum()
    assert report["final"]["test_accuracy"] >= guessing + MARGIN[name]
