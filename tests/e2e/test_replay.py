"""Recorded runs replay to the same model: simulations, and runs on devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloop
from coordinator.demos.demo_fleet import client_data, device_config
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.experiments import experiment as experiments
from coordinator.operator import run_follower
from coordinator.reports.progress import Quiet
from coordinator.runs import simulation
from tests.support.long import extended

SIMULATED: dict[str, Any] = {
    "record": "trace.csv",
    "model": {"name": "logreg"},
    "federation": {"rounds": 3, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1},
    "evaluation": {"sample": 100},
    "simulation": {
        "workers": 1,
        "local_baseline": "off",
        "dropout": 0.2,
        "speed_spread": 1.0,
        "upload": "uniform(1000, 9000)",
        "availability": "uniform(0.5, 1)",
        "availability_period_seconds": 2.0,
        "faults": {"nan": 2, "duplicate": 1},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", extended("sync", "async"))
def test_a_simulation_of_stragglers_and_dropouts_replays_to_the_same_model(tmp_path: Path, mode: str) -> None:
    federation = {**SIMULATED["federation"], "mode": mode} | ({"over_select": 1.5} if mode == "sync" else {})
    document = {**SIMULATED, "federation": federation}
    recorded = fedloop.simulate(document, out=tmp_path / "recorded").report
    trace = tmp_path / "recorded" / "trace.csv"
    replay = {**document, "simulation": {**document["simulation"], "replay": str(trace)}}
    again = fedloop.simulate(replay, out=tmp_path / "again").report
    assert again["final"]["model_sha256"] == recorded["final"]["model_sha256"]
    assert again["rejections"] == recorded["rejections"]
    assert recorded["final"]["test_rows"] == 100 < recorded["final"]["held_out_rows"]
    assert (tmp_path / "again" / "trace.csv").read_bytes() == trace.read_bytes()


@pytest.mark.slow
@pytest.mark.extended
def test_a_resumed_simulation_goes_on_in_its_virtual_time(tmp_path: Path) -> None:
    """Who is there in the third round depends on when it begins."""
    environment = simulation.Environment()
    document = {**SIMULATED, "federation": {**SIMULATED["federation"], "rounds": 2}}
    simulation.simulate(experiments.resolve(document, "test"), tmp_path / "resumed", environment)
    resumed = simulation.resume(tmp_path / "resumed", environment, ["federation.rounds=3"])
    whole = simulation.simulate(experiments.resolve(SIMULATED, "test"), tmp_path / "whole", environment)
    assert resumed["final"]["model_sha256"] == whole["final"]["model_sha256"]
    traces = [(tmp_path / name / "trace.csv").read_bytes() for name in ("resumed", "whole")]
    assert traces[0] == traces[1]


DEVICES = ("east", "north", "south")


def experiment_of(mode: str) -> dict[str, Any]:
    """Two of three devices close a round: which they are is a matter of chance."""
    federation: dict[str, Any] = {"clients": 3, "rounds": 3, "runtimes": {"torch": 1.0}, "mode": mode}
    federation |= (
        {"clients_per_round": 2, "over_select": 1.5} if mode == "sync" else {"concurrency": 3, "buffer": 2}
    )
    return {
        "name": f"recorded-{mode}",
        "record": "trace.csv",
        "data": {"dataset": "digits", "partition": "iid"},
        "model": {"name": "logreg"},
        "federation": federation,
        "local": {"epochs": 1, "batch_size": 16, "lr": 0.05},
    }


def enrol(fleet: LocalFleet) -> list[str]:
    """Starts the devices with their shares, and returns their ids in the order of the shares."""
    for name in DEVICES:
        fleet.add(name, device_config("torch"))
    ids = fleet.ids()
    in_order = sorted(DEVICES, key=lambda name: ids[name])
    shares = client_data(experiments.resolve(experiment_of("sync"), "test"))
    for name, share in zip(in_order, shares, strict=True):
        fleet.write_data(name, share)
        fleet.devices[name].start()
    return [ids[name] for name in in_order]


@pytest.mark.slow
@pytest.mark.extended
def test_runs_on_devices_replay_in_a_simulation_to_the_same_model(tmp_path: Path) -> None:
    """Synchronous with over-selection, and asynchronous."""
    recorded: dict[str, str] = {}
    with local_fleet(tmp_path) as fleet:
        names = enrol(fleet)
        for mode in ("sync", "async"):
            run = fleet.client.post("/runs", {"experiment": experiment_of(mode)})
            report = run_follower.follow(fleet.client, run["id"], tmp_path / mode, Quiet())
            recorded[mode] = report["final"]["model_sha256"]
        fleet.stop()
    for mode, expected in recorded.items():
        replay = {"names": names, "engine": "pool", "replay": str(tmp_path / mode / "trace.csv")}
        document = {**experiment_of(mode), "simulation": replay}
        out = tmp_path / f"{mode}-again"
        report = simulation.simulate(experiments.resolve(document, "test"), out, simulation.Environment())
        assert report["final"]["model_sha256"] == expected, mode
