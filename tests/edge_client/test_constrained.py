"""The constrained tier: tflite-runtime and numpy < 2, in an environment of its own, trains the same models.

The environment is that of FEDLOOP_CONSTRAINED_PYTHON (an interpreter), else `.venv-constrained` of `make constrained`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_client.data import open_data
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.params import unflatten
from tests.support.artifacts import ARCHITECTURES, exported
from tests.support.long import extended
from tests.support.require import require
from tests.support.training_jobs import MODEL, job

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# The job as in the daemon: the interpreter of this environment starts the training process of this environment.
DO_JOBS = """
import json, sys
from contextlib import closing
from pathlib import Path
from edge_client.data import DataConfig
from edge_client.train.process import TrainingJob, Limits, TrainingProcess
from edge_client.wire.device import ModelRef
folder, tflite, manifest, message = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
model = ModelRef("cnn", {}, (8, 8), 10, "float32", "classification")
def job(kind, result):
    return TrainingJob(kind, "litert", folder / "params", None, tflite, manifest, model, message if kind == "train" else {},
               DataConfig("numpy", folder / "data.npz"), None, folder / "state", folder / result)
with closing(TrainingProcess(folder / "log", Limits(400_000_000, 600, 600))) as training:
    training.run(job("train", "result"), lambda: None)
    done = training.run(job("evaluate", "sums"), lambda: None)
print(json.dumps({"peak_memory_bytes": done.peak_memory_bytes}))
"""

SELF_TESTS = """
import json, sys
from pathlib import Path
import numpy
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.wire import manifest
for tflite, described in json.loads(sys.argv[1]):
    LiteRTRuntime(Path(tflite), manifest.from_json(Path(described).read_bytes())).self_test()
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"numpy": numpy.__version__, "loaded": loaded}))
"""

# Every module of ours that the daemon itself may import: not the trainers, and no connector before it is used.
DAEMON = """
import importlib, json, pkgutil, sys
import edge_client, strategies
for package in (edge_client, strategies):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("_trainer", "torch_adamw", "_import", "_file", "_folder")):
            importlib.import_module(module.name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.fixture(scope="module")
def constrained() -> Path:
    """The interpreter of the constrained environment."""
    python = Path(
        os.environ.get("FEDLOOP_CONSTRAINED_PYTHON") or ROOT / ".venv-constrained" / "bin" / "python"
    )
    if not python.exists():
        require("tflite-runtime", f"{python} does not exist; run `make constrained`")
    return python


def output(python: Path, code: str, *arguments: str) -> object:
    done = subprocess.run([python, "-P", "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_training_job_comes_out_as_in_litert(constrained: Path, tmp_path: Path) -> None:
    work = job(tmp_path)
    found, manifest = exported(MODEL)
    trainer = Trainer(LiteRTRuntime(found.tflite, manifest))
    task = TaskMessage.from_json(work.message)
    params, data = arrays.decode(work.params.read_bytes()), open_data(work.data)
    update = trainer.train(params, TrainTask.of(task, {}), data.train()).update
    scores = trainer.evaluate(params, data.held_out())

    output(
        constrained, DO_JOBS, str(tmp_path), str(found.tflite), str(found.manifest), json.dumps(work.message)
    )

    expected = arrays.read_header(encode_result(task, update))
    result = (tmp_path / "result").read_bytes()
    header = arrays.read_header(result)
    assert header.tensors == expected.tensors
    assert header.values == {
        **expected.values, "train_loss": pytest.approx(expected.values["train_loss"], abs=1e-5)
    }  # fmt: skip
    for name, value in unflatten(arrays.decode(result))["delta"].items():
        np.testing.assert_allclose(value, update.delta[name], atol=1e-5)
    sums = json.loads((tmp_path / "sums").read_bytes())
    assert (sums["rows"], sums["correct"]) == (len(data.held_out()), int(scores.correct.sum()))
    assert sums["loss_sum"] == pytest.approx(scores.loss_sum, rel=1e-5)


@pytest.mark.parametrize("names", [["cnn", "charlm"], *extended(list(ARCHITECTURES))], ids=["some", "all"])
def test_architectures_pass_their_self_test(names: list[str], constrained: Path) -> None:
    """Also those whose operations old runtimes may get wrong without a word."""
    files = [(str(found.tflite), str(found.manifest)) for found, _ in map(exported, names)]

    answer = output(constrained, SELF_TESTS, json.dumps(files))

    assert isinstance(answer, dict) and answer["numpy"].startswith("1.")
    assert "tflite_runtime" in answer["loaded"] and "ai_edge_litert" not in answer["loaded"]


@pytest.mark.parametrize("where", ["here", "constrained"])
def test_the_daemon_imports_no_framework(where: str, request: pytest.FixtureRequest) -> None:
    """Here all are installed, and none may be loaded; there none is, and nothing may miss one."""
    python = Path(sys.executable) if where == "here" else request.getfixturevalue("constrained")

    loaded = output(python, DAEMON)

    assert isinstance(loaded, list) and "edge_client" in loaded
    frameworks = {
        "torch",
        "tensorflow",
        "jax",
        "ai_edge_litert",
        "tflite_runtime",
        "scipy",
        "pandas",
        "pyarrow",
        "PIL",
    }
    assert not frameworks & set(loaded)
    assert not {"models", "coordinator", "pydantic", "fastapi", "sqlalchemy"} & set(loaded)
