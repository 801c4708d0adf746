"""`fedloop demo`: the whole loop on digits, in one command.

    1. pretrain  a teacher on a small public part of the data, two processes, DistributedDataParallel
    2. compress  distil a student that fits a small device, quantize it to int8, as a device would run it
    3. federate  train the student over 20 clients that keep the rest of the data private
    4. compress  quantize the federated model

Every stage writes its files into a separate folder; `demo.json` holds the summary. `serve_results` shows the models in the console.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.datacenter import compression, job_worker, jobs
from coordinator.datacenter.compression_sources import Source
from coordinator.datacenter.documents import LINEAGE, MODEL, PUBLIC, REPORT, write_document
from coordinator.datacenter.jobs import DatacenterJob
from coordinator.demos.fedloop_commands import FedloopCommands
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.experiments import experiment
from coordinator.experiments.schema import Experiment
from coordinator.output_folders import require_new
from coordinator.reports.progress import Progress
from coordinator.runs import simulation
from edge_client.files import file_sha256
from models import datasets

NAME = "digits"
PUBLIC_SAMPLES = 100
SEED = 7
_TEACHER = {"channels": [32, 64], "hidden": 64}
_INT8 = {"kind": "quantize", "precision": "static-int8"}


def demo(out: Path, environment: simulation.Environment) -> dict[str, Any]:
    """Runs all stages into the new or empty folder `out`; returns the contents of `demo.json`.

    Its `stages` are the rows of the summary; `bytes` is the size of the file that a device would get.

    Raises:
        UserError: `out` is not empty.
        RunInterrupted: a stage failed; the message says which and where its log is.
    """
    require_new(out)
    show_stage = environment.progress.stage
    data = _public_data()
    model = {"name": "cnn", "input_shape": [8, 8], "classes": 10}
    teacher_model = {**model, "options": _TEACHER}

    def run_job(stage: job_worker.Stage, folder: str, **settings: Any) -> dict[str, Any]:
        job = DatacenterJob(stage, arrays=data, seed=SEED, **{"model": model, **settings})
        return jobs.run(job, out / folder, environment.progress.trained)

    def params(folder: str) -> Path:
        return out / folder / "model.safetensors"

    show_stage(f"1/4 pretraining a teacher on {PUBLIC_SAMPLES} public samples, 2 processes")
    teacher = run_job("pretrain", "teacher", model=teacher_model, options={"shift": 1}, processes=2)
    show_stage("2/4 distilling a student, and quantizing it")
    steps = [{"kind": "distil", "student": "cnn"}, _INT8]
    compressed = run_job(
        "compress", "student", model=teacher_model, params=params("teacher"), more={"steps": steps}
    )
    _, student, student_int8 = compressed["rows"]
    show_stage("3/4 federated training: 20 clients, three runtimes")
    federated = simulation.simulate(_experiment(params("student")), out / "federated", environment)
    show_stage("4/4 quantizing the federated model")
    final = run_job("compress", "federated-int8", params=params("federated"), more={"steps": [_INT8]})
    final_int8 = final["rows"][-1]

    _document_teacher(out / "teacher", teacher_model, teacher, compressed["data_fingerprint"])
    for folder, source, given, result in (
        ("student", "teacher", teacher_model, compressed),
        ("federated-int8", "federated", model, final),
    ):
        origin = {"model_sha256": file_sha256(params(source)), PUBLIC: source == "teacher"}
        compression.write_report(Source(given, params(source), data, SEED, origin), result, out / folder)

    rounds, clients = len(federated["rounds"]), federated["clients"]
    rows = (
        ("teacher", teacher["test_accuracy"], teacher["bytes"], f"{teacher['parameters']:,} parameters, DDP on 2 processes"),
        ("student", student["accuracy"], student["bytes"], f"{student['parameters']:,} parameters, distilled"),
        ("student int8", student_int8["accuracy"], student_int8["bytes"], "static int8 .tflite"),
        ("federated", federated["final"]["test_accuracy"], params("federated").stat().st_size, f"{rounds} rounds, {clients} clients"),
        ("federated int8", final_int8["accuracy"], final_int8["bytes"], "static int8 .tflite"),
    )  # fmt: skip
    document = {
        "stages": [dict(zip(("name", "accuracy", "bytes", "detail"), row, strict=True)) for row in rows],
        "test_rows": len(data["x_test"]),
        **{key: federated[key] for key in ("runtimes", "bytes_up", "bytes_down")},
        "report": str(out / "federated" / "report.json"),
    }
    write_document(out / "demo.json", document)
    return document


def _document_teacher(
    folder: Path, model: Mapping[str, Any], result: Mapping[str, Any], fingerprint: str
) -> None:
    """Writes what a registry asks for: the model's description, its lineage and its figures."""
    sha256 = result["model_sha256"]
    lineage = {
        "model_sha256": sha256,
        "parent": None,
        "data_fingerprint": fingerprint,
        PUBLIC: True,
        "code_version": version("fedloop"),
        "plan": result["plan"],
        "seed": SEED,
    }
    final = {
        key: result[key] for key in ("test_accuracy", "test_loss", "parameters", "bytes", "model_sha256")
    }
    write_document(folder / MODEL, {**model, "sha256": sha256})
    write_document(folder / LINEAGE, lineage)
    write_document(folder / REPORT, {"final": final, "lineage": lineage})


def serve_results(
    out: Path, progress: Progress, show: Callable[[str], None], announce: Callable[[LocalFleet], None]
) -> None:
    """Serves a coordinator without devices whose registry has the models of the demo in `out`, until interrupted.

    `show` is called with each command that registers one, `announce` once all are registered. The coordinator's home is in
    `out`.

    Raises:
        RunInterrupted: a command or the coordinator failed; the message says which, and why.
    """
    out = out.absolute()
    progress.stage("registering the models with a coordinator")
    with local_fleet(out / "served") as fleet:
        fedloop = FedloopCommands(fleet, out, show)
        fedloop("model", "add", "teacher", "--name", NAME)
        fedloop("model", "add", "student", "--name", NAME)
        fedloop("model", "add", "federated", "--name", NAME, "--parent", f"{NAME}:2")
        fedloop("model", "add", "federated-int8", "--name", NAME)
        fedloop("model", "alias", NAME, "champion")
        announce(fleet)
        fleet.serve_until_interrupted()


def _public_data() -> dict[str, Any]:
    """The public rows for training, and the held-out rows that score every stage."""
    dataset = datasets.load(NAME, seed=SEED)
    public = datasets.public_rows(dataset, PUBLIC_SAMPLES, SEED)
    held_out = np.flatnonzero(dataset.test)
    return {
        "x_train": dataset.x[public],
        "y_train": dataset.y[public],
        "x_test": dataset.x[held_out],
        "y_test": dataset.y[held_out],
    }


def _experiment(student: Path) -> Experiment:
    document = {
        "name": "demo",
        "seed": SEED,
        "data": {"dataset": NAME, "partition": "dirichlet(0.3)", "public_samples": PUBLIC_SAMPLES},
        "model": {"name": "cnn", "init": str(student.absolute())},
        "federation": {
            "clients": 20,
            "clients_per_round": 10,
            "rounds": 30,
            "runtimes": {"litert": 0.4, "torch": 0.3, "tensorflow": 0.3},
        },
        "local": {"epochs": 5, "batch_size": 16, "lr": 0.02},
    }
    return experiment.resolve(document, "demo")
