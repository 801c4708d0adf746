"""Successive halving spends what it says, finds the same again, and finds better options than bad ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.processes import process
from models.pretrain.planner import tune
from models.pretrain.training import TrainingOptions

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


@given(st.integers(2, 200), st.integers(1, 1000), st.integers(2, 7))
def test_no_round_takes_more_rows_than_the_first(n: int, rows: int, eta: int) -> None:
    found = tune.rounds(n, rows, eta)
    assert found == [tune.Round(n // eta**i, rows * eta**i) for i in range(len(found))]
    assert all(each.candidates * each.rows <= n * rows for each in found)
    assert 1 <= found[-1].candidates < eta


def test_best_of_a_law_wins_and_others_leave_early() -> None:
    candidates = [
        TrainingOptions(lr=rate, steps=100) for rate in (1.0, 0.1, 0.3, 3.0, 0.01, 0.03, 10.0, 1e-3, 1e-4)
    ]

    def loss(options: TrainingOptions, steps: int) -> float:
        return math.nan if options.lr > 5 else math.log10(options.lr / 0.03) ** 2 + 1 / steps

    table = tune.halve(candidates, tune.rounds(9, 30 * 10, 3), loss)
    assert [one.round for one in table] == [0] * 9 + [1] * 3 + [2]
    assert tune.winner(table).options.lr == 0.03
    assert {one.options.lr for one in table if one.round == 1} == {0.03, 0.01, 0.1}
    assert [one.steps for one in table] == [10] * 9 + [30] * 3 + [90]


def test_draws_are_within_their_bounds_and_the_same_for_a_seed() -> None:
    settings = tune.TuneOptions(candidates=300, batch_least=4, batch_most=64)
    given = TrainingOptions(lr=1e-2, batch_size=16, steps=1000)
    drawn = tune.draw(settings, given, 500, np.random.default_rng(1))
    assert drawn == tune.draw(settings, given, 500, np.random.default_rng(1))
    assert drawn != tune.draw(settings, given, 500, np.random.default_rng(2))
    assert drawn[0] == given
    rates = np.log([options.lr for options in drawn[1:]])
    assert math.log(1e-2 / 30) <= rates.min() and rates.max() <= math.log(0.3)
    # as many below the middle as above, in logarithms: within four standard deviations
    assert abs((rates < math.log(1e-2)).mean() - 0.5) <= 4 * 0.5 / math.sqrt(299)
    assert all(4 <= o.batch_size <= 64 and 1 <= o.warmup <= 400 for o in drawn[1:])
    assert all(abs(o.steps * o.batch_size - 16_000) <= o.batch_size for o in drawn)


def job(folder: Path, **changed: Any) -> Path:
    """A straight boundary between two classes, learned with a learning rate ten thousand times too small."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 8)).astype(np.float32)
    y = (x @ rng.normal(size=8) > 0).astype(np.int32)
    (folder / "arrays").mkdir(exist_ok=True)
    for name, array in {"x_train": x[:300], "y_train": y[:300], "x_test": x[300:], "y_test": y[300:]}.items():
        np.save(folder / "arrays" / f"{name}.npy", array)
    settings: dict[str, Any] = {
        "model": {"name": "mlp", "options": {"hidden": [16]}, "input_shape": [8], "classes": 2},
        "arrays": "arrays",
        "seed": 3,
        "options": {"lr": 1e-6, "batch_size": 16, "steps": 200},
        "tune": {"candidates": 6, "steps": 10, "lr_least": 1e-6, "lr_most": 1e-1, "batch_most": 32},
    }
    path = folder / "job.json"
    path.write_text(json.dumps({**settings, **changed}))
    return path


@pytest.mark.extended
def test_finds_a_better_learning_rate_and_the_same_again(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        command = [sys.executable, "-P", "-m", "models.pretrain.planner.tune", str(job(folder))]
        subprocess.run(command, check=True, env=process.worker_environment(), stdout=subprocess.PIPE)
        found.append(json.loads((folder / "result.json").read_text()))
    assert found[0] == found[1]
    default = found[0]["table"][0]
    assert default["candidate"] == 0 and default["lr"] == 1e-6
    assert found[0]["best"]["loss"] < 0.8 * default["loss"]
    assert found[0]["best"] in found[0]["table"]


@pytest.mark.extended
def test_more_rows_held_back_than_there_are_is_refused(tmp_path: Path) -> None:
    path = job(tmp_path, tune={"held_back": 300})
    command = [sys.executable, "-P", "-m", "models.pretrain.planner.tune", str(path)]
    done = subprocess.run(command, check=False, env=process.worker_environment(), stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert "tune.held_back is 300, expected fewer than the 300 rows" in json.loads(done.stdout)["error"]
