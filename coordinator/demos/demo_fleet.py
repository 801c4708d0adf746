"""`fedloop demo-fleet`: a real federation on this machine, compared with a simulation of it.

    1. a coordinator, and four daemons that enrol with it: two LiteRT, one PyTorch, one TensorFlow
    2. each daemon gets a private share of digits
    3. `fedloop run` trains on them
    4. all processes stop, and a simulation trains on the same shares

Results are in `demo-fleet.json`, the files of the run in `federated/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.demos.local_fleet import LocalFleet, ProcessFailed, local_fleet
from coordinator.errors import RunInterrupted
from coordinator.experiments import experiment as experiments
from coordinator.experiments.schema import Experiment
from coordinator.operator import run_follower
from coordinator.output_folders import require_new
from coordinator.runs import simulation
from edge_client.files import write_durably
from models import datasets

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


@dataclass(frozen=True)
class FleetDemo:
    """The results. `test_rows`: rows behind each of the two accuracies; `stopped`: exit status of every process."""

    fleet_accuracy: float
    simulated_accuracy: float
    test_rows: tuple[int, int]
    runtimes: Mapping[str, str]
    rounds: int
    bytes_up: int
    bytes_down: int
    stopped: Mapping[str, int]
    report: Path


def demo_fleet(out: Path, surroundings: simulation.Environment) -> FleetDemo:
    """Runs the demo into the new or empty folder `out`.

    Raises:
        UserError: `out` is not empty.
        RunInterrupted: a process failed; the message holds the end of its log.
    """
    require_new(out)
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    experiment = experiments.resolve(_EXPERIMENT, "demo-fleet")
    try:
        with local_fleet(out) as fleet:
            names = _enrol(fleet, experiment, surroundings)
            federated = _federate(fleet, out / "federated", surroundings)
            stopped = fleet.stop()
    except ProcessFailed as error:
        raise RunInterrupted(str(error)) from None
    surroundings.progress.stage("4/4 simulating the same shares")
    simulated = simulation.simulate(_same_clients(names), out / "simulated", surroundings)
    result = FleetDemo(
        fleet_accuracy=federated["final"]["test_accuracy"],
        simulated_accuracy=simulated["final"]["test_accuracy"],
        test_rows=(federated["final"]["test_rows"], simulated["final"]["test_rows"]),
        runtimes=DEVICES,
        rounds=len(federated["rounds"]),
        bytes_up=federated["bytes_up"],
        bytes_down=federated["bytes_down"],
        stopped=stopped,
        report=out / "federated" / "report.json",
    )
    document = {**vars(result), "report": str(result.report)}
    write_durably(out / "demo-fleet.json", json.dumps(document, indent=2).encode())
    return result


def _enrol(fleet: LocalFleet, experiment: Experiment, surroundings: simulation.Environment) -> list[str]:
    """Enrols the devices, distributes the shares and starts the daemons; returns their ids in the order of the shares."""
    surroundings.progress.stage("1/4 a coordinator, and devices that enrol with it")
    for name, runtime in DEVICES.items():
        fleet.add(name, device_config(runtime))
    ids = fleet.ids()
    in_order = sorted(DEVICES, key=lambda name: ids[name])  # the order in which a round reads its cohort
    for name, share in zip(in_order, client_data(experiment), strict=True):
        fleet.write_data(name, share)
        fleet.devices[name].start()
    return [ids[name] for name in in_order]


def _federate(fleet: LocalFleet, out: Path, surroundings: simulation.Environment) -> dict[str, Any]:
    surroundings.progress.stage("2/4 exporting the model, waiting for the devices")
    run = run_follower.submit(fleet.client, _EXPERIMENT)
    surroundings.progress.stage("3/4 federated training on four devices")
    return run_follower.follow(fleet.client, run["id"], out, surroundings.progress)


def _same_clients(names: list[str]) -> Experiment:
    """The experiment over simulated clients with the devices' ids, which therefore draw the same batches."""
    return experiments.resolve({**_EXPERIMENT, "simulation": {"names": names}}, "demo-fleet")


def device_config(runtime: str, dataset: str = "digits") -> dict[str, Any]:
    """Configuration of a device that trains in one runtime on `data.npz` beside it."""
    return {"runtimes": [runtime], "data": {dataset: {"kind": "numpy", "path": "data.npz"}}}


def client_data(experiment: Experiment) -> list[dict[str, npt.NDArray[Any]]]:
    """The training and test rows of each client in the simulation of `experiment`."""
    data, clients = experiment.data, experiment.federation.clients
    assert clients is not None and data.partition is not None  # resolved
    dataset = datasets.load(data.dataset, seed=experiment.seed)
    parts = datasets.partition(data.partition, dataset, clients=clients, seed=experiment.seed)
    return split_arrays(dataset, parts, experiment.seed)


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
