"""What a run needs: its rows follow `data.seed`, everything else `seed`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coordinator.experiments import experiment
from coordinator.runs.model_setup import load_data, make_run_plan
from coordinator.workers.pool import WorkerPool
from strategies import presets


def test_trainings_of_one_data_seed_have_the_same_rows(tmp_path: Path) -> None:
    def rows(name: str, *sets: str) -> list[bytes]:
        data = ["data.dataset=synthetic(shape=[2], classes=2, samples=30)", "federation.clients=3"]
        resolved = experiment.load(None, [*data, "federation.clients_per_round=3", *sets])
        load_data(resolved, tmp_path / name, pool, None)
        return [np.load(tmp_path / name / f"{part}.npy").tobytes() for part in ("x", "test_rows", "parts")]

    with WorkerPool(1, tmp_path / "workers.log") as pool:
        first = rows("first", "seed=1", "data.seed=5")
        assert rows("second", "seed=2", "data.seed=5") == first
        assert rows("third", "seed=5") == first
        assert rows("fourth", "seed=1") != first


def test_the_data_seed_changes_neither_cohorts_nor_batches() -> None:
    plans = [
        make_run_plan(experiment.load(None, [f"data.seed={seed}"]), presets.get("fedavg"), ["w"], 10)
        for seed in (1, 2)
    ]
    assert plans[0].seed == plans[1].seed == 7
