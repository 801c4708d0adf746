"""HeteroFL over real daemons: each trains the width that its memory allows, and the model is that of a simulation, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloop
from coordinator.demos.demo_fleet import client_data
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.experiments import experiment as experiments
from coordinator.operator import run_follower
from coordinator.reports.progress import Quiet
from coordinator.runs.population.clients import deal_out
from tests.support.cli import CACHE

pytestmark = [pytest.mark.slow, pytest.mark.extended]

MEMORY = {"full": 1200, "half": 1000, "quarter": 800}
DATA = {"digits": {"kind": "numpy", "path": "data.npz"}}
SEED = 3


def document(runtimes: dict[str, float], clients: int) -> dict[str, Any]:
    return {
        "seed": SEED,
        "data": {"dataset": "digits", "partition": "iid"},
        "model": {"name": "mlp", "hidden": [16]},
        "federation": {"clients": clients, "clients_per_round": clients, "rounds": 2, "runtimes": runtimes},
        "local": {"epochs": 2, "batch_size": 16, "lr": 0.1},
        "strategy": {"name": "heterofl", "memory_mib": {"full": 1100, "half": 900, "quarter": 0}},
        "devices": {"evaluate_every": 2},
    }


def trained(folder: Path, given: dict[str, Any], classes: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The report of a run on daemons, and their ids in the order of the shares. `classes`: of the daemons in that order."""
    federation = given["federation"]
    runtimes = deal_out(federation["runtimes"], federation["clients"], SEED, "runtimes")
    shares = client_data(experiments.resolve({**given, "strategy": {}}, "test"))
    with local_fleet(folder, environment={"FEDLOOP_CACHE_DIR": str(CACHE)}) as fleet:
        for number in range(len(shares)):
            fleet.add(f"device-{number}", {"data": DATA})
        named = sorted((device, name) for name, device in fleet.ids().items())
        for (_, name), share, runtime, size in zip(named, shares, runtimes, classes, strict=True):
            fleet.write_data(name, share)
            limit = {"FEDLOOP_EDGE_LIMITS_MEMORY_BYTES": str(MEMORY[size] * 2**20)}
            fleet.devices[name].start({"FEDLOOP_EDGE_RUNTIMES": f'["{runtime}"]', **limit})
        report = follow(fleet, given, folder / "federated")
        assert set(fleet.stop().values()) == {0}
    return report, [device for device, _ in named]


def follow(fleet: LocalFleet, given: dict[str, Any], out: Path) -> dict[str, Any]:
    run = fleet.client.post("/runs", {"experiment": given})
    report: dict[str, Any] = run_follower.follow(fleet.client, run["id"], out, Quiet())
    return report


def simulated(folder: Path, given: dict[str, Any], ids: list[str], classes: list[str]) -> dict[str, Any]:
    """The report of a simulation of the same clients."""
    profiles = folder / "clients.csv"
    lines = [f"{device},{MEMORY[size]}" for device, size in zip(ids, classes, strict=True)]
    profiles.write_text("\n".join(["client,memory_mib", *lines]), "utf-8")
    simulation = {"names": ids, "profiles": str(profiles), "workers": 1}
    report: dict[str, Any] = fedloop.simulate({**given, "simulation": simulation}, out=folder / "sim").report
    return report


def test_daemons_of_three_classes_end_in_the_bits_of_their_simulation(tmp_path: Path) -> None:
    """Two on LiteRT and two on PyTorch; every second round each scores its own part of the model on its own rows."""
    classes = ["half", "quarter", "full", "quarter"]
    given = document({"torch": 0.5, "litert": 0.5}, len(classes))
    report, ids = trained(tmp_path, given, classes)
    expected = simulated(tmp_path, given, ids, classes)
    assert report["final"]["model_sha256"] == expected["final"]["model_sha256"]
    for key in ("bytes_up", "bytes_down"):
        assert report[key] == expected[key]
    assert report["runtimes"] == {"litert": 2, "torch": 2}
    for name, each in report["device_classes"].items():
        of_class = [device for device, its in zip(ids, classes, strict=True) if its == name]
        assert (each["clients"], each["devices"]) == (len(of_class), of_class)
        for key in ("width", "params", "options", "test_accuracy", "test_loss"):
            assert each[key] == expected["device_classes"][name][key]
    last = report["rounds"][-1]
    assert {name: each["devices"] for name, each in last["per_model_class"].items()} == {
        "full": 1,
        "half": 1,
        "quarter": 2,
    }
    assert last["on_devices"]["test_rows"] == report["final"]["test_rows"]
