"""`fedloop demo-fleet`: a real federation on this machine, beside a simulation of the same one.

    1. a coordinator, and four daemons that enrol with it: two LiteRT, one PyTorch, one TensorFlow
    2. each daemon gets a share of digits, which nobody else sees
    3. `fedloop run` trains over them
    4. everything is stopped, and the same shares are trained on in a simulation

What it came to is in `demo-fleet.json`, the run's own files are in `federated/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator import experiment as experiments
from coordinator import following
from coordinator.errors import RunInterrupted, UserError
from coordinator.local_fleet import LocalFleet, ProcessFailed, local_fleet
from coordinator.simulation import run as simulation
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
    """What it came to. `stopped`: exit status of every process."""

    fleet_accuracy: float
    simulated_accuracy: float
    runtimes: Mapping[str, str]
    rounds: int
    bytes_up: int
    bytes_down: int
    stopped: Mapping[str, int]
    report: Path


def demo_fleet(out: Path, surroundings: simulation.Surroundings) -> FleetDemo:
    """Runs the demo into the new or empty folder `out`.

    Raises:
        UserError: `out` is not empty.
        RunInterrupted: a process failed; the message holds the end of its log.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: the folder is not empty; name another one")
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
    surroundings.progress.stage("4/4 the same shares in a simulation")
    simulated = simulation.simulate(_same_clients(names), out / "simulated", surroundings)
    result = FleetDemo(
        fleet_accuracy=federated["final"]["test_accuracy"],
        simulated_accuracy=simulated["final"]["test_accuracy"],
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


def _enrol(
    fleet: LocalFleet, experiment: experiments.Experiment, surroundings: simulation.Surroundings
) -> list[str]:
    """Enrols the devices, deals the shares out and starts the daemons; their ids, in the order of the shares."""
    surroundings.progress.stage("1/4 a coordinator, and devices that enrol with it")
    for name, runtime in DEVICES.items():
        fleet.add(name, device_config(runtime))
    ids = fleet.ids()
    in_order = sorted(DEVICES, key=lambda name: ids[name])  # as a round reads its cohort
    for name, share in zip(in_order, shares(experiment), strict=True):
        fleet.give(name, share)
        fleet.devices[name].start()
    return [ids[name] for name in in_order]


def _federate(fleet: LocalFleet, out: Path, surroundings: simulation.Surroundings) -> dict[str, Any]:
    surroundings.progress.stage("2/4 exporting the model, waiting for the devices")
    run = following.submit(fleet.client, _EXPERIMENT, [])
    surroundings.progress.stage("3/4 federated training on four devices")
    return following.follow(fleet.client, run["id"], out, surroundings.progress)


def _same_clients(names: list[str]) -> experiments.Experiment:
    """The experiment over simulated clients that bear the devices' ids, and so draw the same batches."""
    return experiments.resolve({**_EXPERIMENT, "simulation": {"names": names}}, "demo-fleet")


def device_config(runtime: str, dataset: str = "digits") -> dict[str, Any]:
    """Configuration of a device that trains in one runtime on `data.npz` beside it, whatever it is called."""
    return {"runtimes": [runtime], "data": {dataset: {"kind": "numpy", "path": "data.npz"}}}


def shares(experiment: experiments.Experiment) -> list[dict[str, npt.NDArray[Any]]]:
    """What each client has in the simulation of `experiment`: its rows to train on, and to test on."""
    data, clients = experiment.data, experiment.federation.clients
    assert clients is not None and data.partition is not None  # resolved
    dataset = datasets.load(data.dataset, seed=experiment.seed)
    parts = datasets.partition(data.partition, dataset, clients=clients, seed=experiment.seed)
    return arrays_of(dataset, parts, experiment.seed)


def arrays_of(
    dataset: datasets.Dataset, parts: Sequence[npt.NDArray[np.int64]], seed: int
) -> list[dict[str, npt.NDArray[Any]]]:
    """What each client has, by its rows in `parts`; test rows are shared out as `datasets.owners` does."""
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
