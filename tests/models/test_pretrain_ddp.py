"""Two processes train the model one process would train; two that do not talk to each other do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from coordinator.datacenter import jobs
from models.labels import PADDING

pytestmark = pytest.mark.slow

MODEL = {"name": "cnn", "input_shape": [6, 6], "classes": 4, "options": {"channels": [4, 8]}}
OPTIONS = {"epochs": 5, "batch_size": 16, "optimizer": "sgd", "lr": 0.1, "shift": 1}
STEPS = 20
TOLERANCE = 1e-5  # float32 sums in another order, over 20 steps


@pytest.fixture(scope="module")
def arrays() -> Mapping[str, np.ndarray]:
    """61 rows: the last of four batches has 13, 7 for one rank and 6 for the other; some do not count."""
    rng = np.random.default_rng(0)
    y = np.arange(61, dtype=np.int32) % 4
    x = rng.normal(size=(4, 6, 6))[y] + 0.5 * rng.normal(size=(61, 6, 6))
    x_test, y_test = x[:20].astype(np.float32), y[:20].copy()
    y[::7] = PADDING
    return {"x_train": x.astype(np.float32), "y_train": y, "x_test": x_test, "y_test": y_test}


@pytest.fixture(scope="module")
def job(arrays: Mapping[str, np.ndarray]) -> jobs.DatacenterJob:
    return jobs.DatacenterJob("pretrain", MODEL, arrays, OPTIONS, seed=5)


@pytest.fixture(scope="module")
def alone(job: jobs.DatacenterJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("alone")
    return jobs.run(job, folder), folder


@pytest.mark.extended
def test_two_processes_train_what_one_trains(
    job: jobs.DatacenterJob,
    alone: tuple[dict[str, Any], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "models.py").write_text("raise RuntimeError('a user has a models.py of their own')\n")
    monkeypatch.chdir(tmp_path)
    epochs: list[Any] = []
    both = jobs.run(
        jobs.DatacenterJob(job.stage, job.model, job.arrays, job.options, job.seed, processes=2),
        tmp_path / "both",
        lambda line: epochs.append(line["epoch"]),
    )
    one, folder = alone
    assert (both["world_size"], both["backend"]) == (2, "gloo")
    assert one["world_size"] == 1
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1, 2, 3, 4, 5}
    assert len(one["losses"]) == STEPS
    np.testing.assert_allclose(both["losses"], one["losses"], atol=TOLERANCE)
    expected = safetensors.numpy.load((folder / "model.safetensors").read_bytes())
    actual = safetensors.numpy.load((tmp_path / "both" / "model.safetensors").read_bytes())
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], atol=TOLERANCE, err_msg=name)


@pytest.mark.extended
def test_two_processes_that_do_not_exchange_gradients_differ(
    alone: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """The control: the comparison above notices when the exchange is missing."""
    one, folder = alone
    settings = json.loads((folder / "job.json").read_text())
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**settings, "arrays": str(folder / "arrays")}))
    script = tmp_path / "unsynchronised.py"
    script.write_text(
        "from edge_client.processes import process\n"
        "from models.pretrain import training_process\n"
        "from models.pretrain.parallel.data import sharding\n"
        "sharding.DistributedDataParallel = lambda module, **options: module\n"
        "process.serve(training_process.pretrain)\n"
    )
    python = [sys.executable, "-P"]
    torchrun = [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    subprocess.run(
        [*torchrun, *python, str(script), str(path)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    apart = json.loads((tmp_path / "result.json").read_text())
    assert apart["world_size"] == 2
    assert apart["losses"][0] == pytest.approx(
        one["losses"][0], abs=TOLERANCE
    )  # same start, same first batch
    assert np.abs(np.subtract(apart["losses"], one["losses"])).max() > 1000 * TOLERANCE
