"""`fedloop demo-fleet`: a real federation on this machine, compared with a simulation of it.

    1. a coordinator, and four daemons that enrol with it: two LiteRT, one PyTorch, one TensorFlow
    2. each daemon gets a private share of digits
    3. `fedloop run` trains on them
    4. all processes stop, and a simulation trains on the same shares

Results are in `demo-fleet.json`, the files of the run in `federated/`. `serve_fleet` keeps the same fleet training instead, for the
console.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.datacenter.documents import write_document
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.experiments import experiment as experiments
from coordinator.experiments.schema import Experiment
from coordinator.operator import run_follower
from coordinator.output_folders import require_new
from coordinator.runs import simulation
from models import datasets

NAME, SEED = "digits", 7
PUBLIC_SAMPLES = 150
SITES = ("north", "east", "south", "west")
"""Devices of demonstrations that begin with a model trained on public rows."""
DEVICES = {"meter-1": "litert", "meter-2": "litert", "gateway": "torch", "server": "tensorflow"}
_EXPERIMENT: dict[str, Any] = {
    "name": "demo-fleet",
    "data": {"dataset": "digits", "partition": "iid"},
    "federation": {
        "clients": len(DEVICES),
        "rounds": 5,
        "runtimes": {"litert": 0.5, "torch": 0.25, "tensorflow": 0.25},
    },
    "local": {"epochs": 5, "batch_size": 16, "lr": 0.05},
    "devices": {"evaluate_every": 1},
}


_SERVED_ROUNDS = 10_000
"""Of the run that `serve_fleet` starts: more than anyone watches."""


def demo_fleet(out: Path, environment: simulation.Environment) -> dict[str, Any]:
    """Runs the demo into the new or empty folder `out`; returns the contents of `demo-fleet.json`.

    `test_rows`: rows behind each of the two accuracies; `stopped`: exit status of every process.

    Raises:
        UserError: `out` is not empty.
        ProcessFailed: a process failed; the message holds the end of its log.
    """
    require_new(out)
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    progress = environment.progress
    with local_fleet(out) as fleet:
        progress.stage("1/4 a coordinator, and devices that enrol with it")
        names = _enrol(fleet)
        progress.stage("2/4 exporting the model, waiting for the devices")
        run = fleet.client.post("/runs", {"experiment": _EXPERIMENT})
        progress.stage("3/4 federated training on four devices")
        federated = run_follower.follow(fleet.client, run["id"], out / "federated", progress)
        stopped = fleet.stop()
    progress.stage("4/4 simulating the same shares")
    # Simulated clients with the devices' ids draw the same batches as the devices.
    same_clients = experiments.resolve({**_EXPERIMENT, "simulation": {"names": names}}, "demo-fleet")
    simulated = simulation.simulate(same_clients, out / "simulated", environment)
    fleet_result, simulated_result = federated["final"], simulated["final"]
    document = {
        "fleet_accuracy": fleet_result["test_accuracy"],
        "simulated_accuracy": simulated_result["test_accuracy"],
        "test_rows": [fleet_result["test_rows"], simulated_result["test_rows"]],
        "runtimes": DEVICES,
        "rounds": len(federated["rounds"]),
        "bytes_up": federated["bytes_up"],
        "bytes_down": federated["bytes_down"],
        "stopped": stopped,
        "report": str(out / "federated" / "report.json"),
    }
    write_document(out / "demo-fleet.json", document)
    return document


def serve_fleet(
    out: Path, environment: simulation.Environment, announce: Callable[[LocalFleet], None]
) -> None:
    """Serves a coordinator whose four devices train without end, until interrupted; its files are in `out`.

    `announce` is called once the devices train.

    Raises:
        UserError: `out` is not empty.
        ProcessFailed: a process failed; the message holds the end of its log.
    """
    require_new(out)
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with local_fleet(out) as fleet:
        environment.progress.stage("a coordinator, and devices that enrol with it")
        _enrol(fleet)
        federation = {**_EXPERIMENT["federation"], "rounds": _SERVED_ROUNDS}
        fleet.client.post("/runs", {"experiment": {**_EXPERIMENT, "federation": federation}})
        announce(fleet)
        fleet.serve_until_interrupted()


def _enrol(fleet: LocalFleet) -> list[str]:
    """Enrols the devices, distributes the shares and starts the daemons; returns their ids in the order of the shares."""
    for name, runtime in DEVICES.items():
        fleet.add(name, device_config(runtime))
    ids = fleet.ids()
    in_order = sorted(DEVICES, key=lambda name: ids[name])  # the order in which a round reads its cohort
    for name, share in zip(
        in_order, client_data(experiments.resolve(_EXPERIMENT, "demo-fleet")), strict=True
    ):
        fleet.write_data(name, share)
        fleet.devices[name].start()
    return [ids[name] for name in in_order]


def device_config(runtime: str, dataset: str = "digits") -> dict[str, Any]:
    """Configuration of a device that trains in one runtime on `data.npz` beside it."""
    return {"runtimes": [runtime], "data": {dataset: {"kind": "numpy", "path": "data.npz"}}}


def client_data(experiment: Experiment) -> list[dict[str, npt.NDArray[Any]]]:
    """The training and test rows of each client in the simulation of `experiment`."""
    data, clients = experiment.data, experiment.federation.clients
    assert clients is not None and data.partition is not None  # resolved
    dataset = datasets.load(data.dataset, seed=experiment.data_seed, clients=clients)
    parts = datasets.partition(data.partition, dataset, clients=clients, seed=experiment.data_seed)
    return split_arrays(dataset, parts, experiment.data_seed)


def split_arrays(
    dataset: datasets.Dataset, parts: Sequence[npt.NDArray[np.int64]], seed: int
) -> list[dict[str, npt.NDArray[Any]]]:
    """The arrays of each client, by its rows in `parts`; `datasets.owners` distributes the test rows."""
    owners = datasets.owners(dataset, parts, seed)
    test = dataset.test.nonzero()[0]
    return [
        {
            "x": dataset.x[part],
            "y": dataset.y[part],
            "x_test": dataset.x[test[owners == index]],
            "y_test": dataset.y[test[owners == index]],
        }
        for index, part in enumerate(parts)
    ]


def site_data() -> list[dict[str, npt.NDArray[Any]]]:
    """The arrays of each site: a part of the rows that are not public, with an uneven share of the classes."""
    dataset = datasets.load(NAME, seed=SEED)
    public = datasets.public_rows(dataset, PUBLIC_SAMPLES, SEED)
    parts = datasets.partition("dirichlet(0.5)", dataset, clients=len(SITES), seed=SEED, exclude=public)
    return split_arrays(dataset, parts, SEED)
