"""An experiment as a Flower app: on a Grid in this process, on a SuperLink with SuperNodes, and on Flower's simulation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedloop
from coordinator.experiments import experiment as experiments
from coordinator.on_flower import folder as app_folder
from coordinator.on_flower import server
from coordinator.on_flower.settings import RunSettings
from tests.support.flower_grid import app_grid
from tests.support.superlink import SuperLink
from tests.support.waiting import wait_until

EXPERIMENT: dict[str, Any] = {
    "name": "on Flower",
    "data": {"dataset": "synthetic(shape=[8], classes=3, samples=60)", "partition": "iid"},
    "model": {"name": "logreg"},
    "federation": {"clients": 2, "clients_per_round": 2, "rounds": 2, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1, "lr": 0.1},
    "strategy": {"name": "scaffold"},
    "simulation": {"workers": 1},
}


def write_app(folder: Path, document: Mapping[str, Any] = EXPERIMENT) -> Path:
    app_folder.write(experiments.resolve(document, "experiment"), folder / "app", folder / "run", folder)
    return folder / "app"


def simulated_hash(document: Mapping[str, Any], folder: Path) -> str:
    return str(fedloop.simulate(dict(document), out=folder).report["final"]["model_sha256"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the simulated model."""
    return simulated_hash(EXPERIMENT, tmp_path_factory.mktemp("simulated") / "run")


@pytest.mark.slow
def test_nodes_train_the_model_that_a_simulation_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    app = write_app(tmp_path)
    report = server.run(app, app_grid(app, 2), RunSettings(tmp_path / "run"))
    assert report["final"]["model_sha256"] == expected
    assert [row["accepted"] for row in report["rounds"]] == [2, 2]


@pytest.mark.slow
def test_a_superlink_with_supernodes_trains_the_model_that_a_simulation_trains(
    tmp_path: Path, expected: str
) -> None:
    app = write_app(tmp_path)
    with SuperLink(tmp_path) as link:
        for partition in range(2):
            link.add_node(f"partition-id={partition} num-partitions=2")
        output, _ = link.flwr_run(app).communicate()
    assert read_hash(tmp_path / "run", output + link.logs()) == expected


@pytest.mark.slow
@pytest.mark.extended
def test_flowers_simulation_trains_the_model_that_a_simulation_trains(tmp_path: Path, expected: str) -> None:
    app = write_app(tmp_path)
    with SuperLink(tmp_path, "--simulation") as link:
        output, _ = link.flwr_run(app, "--federation-config", "num-supernodes=2").communicate()
    assert read_hash(tmp_path / "run", output + link.logs()) == expected


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_goes_on_in_another_flower_run_after_its_superlink_was_killed(tmp_path: Path) -> None:
    document = {**EXPERIMENT, "federation": {**EXPERIMENT["federation"], "rounds": 4}}
    app, checkpoint = write_app(tmp_path, document), tmp_path / "run" / "checkpoint" / "checkpoint.json"
    with SuperLink(tmp_path) as link:
        for partition in range(2):
            link.add_node(f"partition-id={partition} num-partitions=2")
        first = link.flwr_run(app)
        wait_until(lambda: checkpoint.exists() or first.poll() is not None)
        link.kill()
        first.communicate()
        assert not (tmp_path / "run" / "report.json").exists()
        link.start()
        output, _ = link.flwr_run(app).communicate()
    expected = simulated_hash(document, tmp_path / "simulated")
    assert read_hash(tmp_path / "run", output + link.logs()) == expected
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count('"run_started"') == events.count('"run_resumed"') == 1


def read_hash(run: Path, log: str) -> str:
    """The hash of the model that a run has left in its folder."""
    assert (run / "report.json").exists(), log
    return str(json.loads((run / "report.json").read_text())["final"]["model_sha256"])
