"""Memory of a small device: the daemon with all it imports, and the training process on digits.

The daemon is measured as an interpreter that has imported every module of the daemon and done nothing yet; what
an open connection and a state file add is some megabytes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from edge_client.connectors import DataConfig
from edge_client.train.process import Job, Limits, TrainingProcess
from edge_client.wire import arrays
from edge_client.wire.device import ModelRef
from edge_client.wire.messages import TaskMessage
from models import datasets, zoo
from models.export.request import ExportRequest, export
from tests.support.artifacts import ROOT, cache_dir
from tests.support.local_data import first_params

BATCH = 16
DAEMON_BYTES = 90_000_000
TOGETHER_BYTES = 150_000_000

# More than one daemon imports: the modules of all commands.
_DAEMON = """
import importlib, pkgutil
import edge_client, edge_client.train.process, edge_client.train.resolve
for module in pkgutil.iter_modules(edge_client.__path__, "edge_client."):
    if not module.ispkg:
        importlib.import_module(module.name)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS:")][0])
"""


def run() -> dict[str, int]:
    """Resident bytes: of the idle daemon, of the training process at its peak, and of both together."""
    daemon, training = daemon_bytes(), training_bytes()
    print(f"daemon, imported and idle: {daemon / 1e6:.0f} MB (limit {DAEMON_BYTES / 1e6:.0f})")
    print(f"training process, cnn on digits, peak: {training / 1e6:.0f} MB")
    print(f"together: {(daemon + training) / 1e6:.0f} MB (limit {TOGETHER_BYTES / 1e6:.0f})")
    return {"daemon": daemon, "training_peak": training, "together": daemon + training}


def daemon_bytes() -> int:
    done = subprocess.run([sys.executable, "-P", "-c", _DAEMON], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def training_bytes() -> int:
    """Peak of a training process over an epoch of all of digits and an evaluation, in LiteRT."""
    with tempfile.TemporaryDirectory() as folder:
        job = _job(Path(folder))
        with TrainingProcess(Path(folder) / "log", Limits(TOGETHER_BYTES, 600, 600)) as training:
            training.run(job, lambda: None)
            evaluation = Job(**{**vars(job), "kind": "evaluate", "message": {}})
            return training.run(evaluation, lambda: None).peak_memory_bytes


def _job(folder: Path) -> Job:
    dataset = datasets.load("digits", seed=0)
    np.savez(folder / "data.npz", x=dataset.x, y=dataset.y)
    model = ModelRef("cnn", {}, dataset.input_shape, dataset.classes, "float32", "classification")
    request = ExportRequest(model.name, {}, model.input_shape, model.classes, batch_size=BATCH)
    found = export(request, cache_dir(), code_folder=ROOT)
    spec = zoo.get(model.name, input_shape=model.input_shape, classes=model.classes)
    (folder / "params").write_bytes(arrays.encode(first_params(spec)))
    return Job(
        kind="train",
        runtime="litert",
        params=folder / "params",
        streams=None,
        tflite=found.tflite,
        manifest=found.manifest,
        model=model,
        message=TaskMessage(1, "device", "0" * 64, 0, BATCH, 0.05, 1, None, {"name": "plain"}).to_json(),
        data=DataConfig("numpy", folder / "data.npz"),
        state_in=None,
        state_out=folder / "state",
        result=folder / "result",
    )


if __name__ == "__main__":
    run()
