"""An experiment as a Flower app: on a Grid in this process, on a SuperLink with SuperNodes, and on Flower's simulation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit
from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

import fedloop
from coordinator.demos.demo_fleet import client_data
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiments import experiment as experiments
from coordinator.on_flower import folder as app_folder
from coordinator.on_flower import server
from coordinator.on_flower.settings import RunSettings, read_node, read_run
from tests.support.cli import run_cli
from tests.support.flower_grid import app_grid, app_node
from tests.support.superlink import SuperLink
from tests.support.waiting import wait_until

EXPERIMENT: dict[str, Any] = {
    "name": "on Flower",
    "data": {"dataset": "synthetic(shape=[8], classes=3, samples=60)", "partition": "iid"},
    "model": {"name": "logreg"},
    "federation": {
        "clients": 2,
        "clients_per_round": 2,
        "rounds": 2,
        "runtimes": {"torch": 1.0},
        "deadline_seconds": 3600.0,
    },
    "local": {"epochs": 1, "lr": 0.1},
    "strategy": {"name": "scaffold"},
    "simulation": {"workers": 1, "engine": "pool"},
    # Both outlast a busy machine: a round that begins or ends without a client gives another model.
    "devices": {"patience_seconds": 3600.0},
}


OWN_MODEL = """
from torch import nn

def build(input_shape, classes):
    return nn.Sequential(nn.Linear(input_shape[0], 4), nn.ReLU(), nn.Linear(4, classes))
"""


def write_app(folder: Path, document: Mapping[str, Any] = EXPERIMENT) -> Path:
    app_folder.write(experiments.resolve(document, "experiment"), folder / "app", folder / "run", folder)
    return folder / "app"


def simulated_hash(document: Mapping[str, Any], folder: Path) -> str:
    return str(fedloop.simulate(dict(document), out=folder).report["final"]["model_sha256"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the simulated model."""
    return simulated_hash(EXPERIMENT, tmp_path_factory.mktemp("simulated") / "run")


@pytest.mark.extended
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
def test_nodes_with_rows_of_their_own_train_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    """Each node has the rows that it would be dealt; so the model is the same, though nobody deals them out."""
    monkeypatch.chdir(tmp_path)
    app, experiment = write_app(tmp_path), experiments.resolve(EXPERIMENT, "experiment")
    grid = app_grid(app, 2, {"rows": "own"})
    for node, share in enumerate(client_data(experiment), start=1):
        home = tmp_path / f"node-{node}"
        home.mkdir()
        np.savez(home / "rows.npz", **share)  # type: ignore[arg-type]
        table = tomlkit.dumps({"data": {experiment.data.dataset: {"kind": "numpy", "path": "rows.npz"}}})
        (home / "edge.toml").write_text(table)
        grid.nodes[node] = app_node(
            app, node - 1, 2, {"rows": "own"}, **{"edge-config": str(home / "edge.toml")}
        )
    report = server.run(app, grid, RunSettings(tmp_path / "run", own_rows=True))
    assert report["final"]["model_sha256"] == expected
    assert [row["client_accuracy_median"] for row in report["rounds"]] == [None, None]


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_goes_on_after_its_grid_broke_and_is_then_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    app, settings = write_app(tmp_path), RunSettings(tmp_path / "run")
    breaking = app_grid(app, 2)
    trained = breaking.nodes[2]

    def break_in_the_second_round(message: Message) -> Message:
        if message.metadata.group_id == "2":
            raise ConnectionError("the SuperLink is gone")
        return trained(message)

    breaking.nodes[2] = break_in_the_second_round
    with pytest.raises(
        RunInterrupted, match="the SuperLink is gone; nothing committed is lost; go on with: flwr run"
    ):
        server.run(app, breaking, settings)
    assert server.run(app, app_grid(app, 2), settings)["final"]["model_sha256"] == expected
    idle = app_grid(app, 2)
    assert server.run(app, idle, settings)["final"]["model_sha256"] == expected
    assert idle.sent == []  # it was finished
    other = write_app(tmp_path / "other", {**EXPERIMENT, "seed": 8})
    with pytest.raises(UserError, match="holds a run of another experiment; name another folder"):
        server.run(other, idle, settings)


@pytest.mark.slow
@pytest.mark.extended
def test_nodes_with_litert_and_code_of_the_user_train_the_model_that_a_simulation_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    federation = {**EXPERIMENT["federation"], "runtimes": {"litert": 1.0}}
    document = {**EXPERIMENT, "model": {"name": "mine:build"}, "federation": federation}
    hashed = simulated_hash(document, tmp_path / "simulated")
    app = write_app(tmp_path, document)
    (tmp_path / "mine.py").unlink()  # what was copied counts
    report = server.run(app, app_grid(app, 2), RunSettings(tmp_path / "run"))
    assert report["final"]["model_sha256"] == hashed


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"simulation": {"dropout": 0.5}}, "simulation.dropout = 0.5: "),
        ({"simulation": {"faults": {"nan": 1}}}, "simulation.faults = {'nan': 1}: "),
        ({"simulation": {"attack": {"name": "ipm", "clients": 1}}}, "simulation.attack = 'ipm': "),
        ({"simulation": {"fine_tune": {"epochs": 2}}}, "simulation.fine_tune = "),
        ({"federation": {"relays": 2}}, "federation.relays = 2: "),
        ({"model": {"name": "models:build"}}, "names the module 'models'"),
    ],
)
def test_an_experiment_that_cannot_run_on_flower_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        write_app(tmp_path, {**EXPERIMENT, **changes})
    assert not (tmp_path / "app").exists()


def context(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Context:
    return Context(1, 2, dict(node_config), RecordDict(), dict(run_config))


DEALT = {"partition-id": 0, "num-partitions": 2}


@pytest.mark.parametrize(
    ("read", "node_config", "run_config", "problem"),
    [
        (read_run, {}, {"out": "runs/mine"}, "out = 'runs/mine' is not an absolute path"),
        (read_run, {}, {"out": "/runs/mine", "rows": "mine"}, "rows = 'mine': expected 'dealt' or 'own'"),
        (read_node, {"partition-id": 0}, {}, "gives partition-id=0; expected both numbers"),
        (read_node, {}, {}, "gives neither; expected both numbers"),
        (read_node, DEALT, {"rows": "own"}, "names no rows"),
    ],
)
def test_a_wrong_configuration_is_named(
    read: Callable[[Context], object], node_config: Any, run_config: Any, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        read(context(node_config, run_config))


@pytest.mark.slow
def test_a_node_says_why_it_cannot_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = write_app(tmp_path)
    with pytest.raises(UserError, match=r"node 1 cannot take part: .*edge.toml"):
        grid = app_grid(app, 2, {"rows": "own"}, **{"edge-config": str(tmp_path / "edge.toml")})
        server.run(app, grid, RunSettings(tmp_path / "run", own_rows=True))


@pytest.mark.slow
def test_the_command_writes_an_app_that_flower_takes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(tomlkit.dumps(EXPERIMENT))
    done = run_cli("flower-app", str(path), "--out", "app", "--run-folder", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings, warnings = load_and_validate(tmp_path / "app" / "pyproject.toml")
    assert warnings == []
    assert settings["tool"]["flwr"]["app"]["config"]["out"] == str(tmp_path / "run")
    assert build_fab_from_disk(tmp_path / "app")
    again = run_cli("flower-app", str(path), "--out", "app", cwd=tmp_path)
    assert again.returncode == 2
    assert "the folder is not empty" in again.stderr


@pytest.mark.slow
@pytest.mark.extended  # Flower gives up on a process that takes 30 s to start, which a busy machine needs
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
        first.kill()
        first.communicate()
        assert not (tmp_path / "run" / "report.json").exists()
        link.start()
        link.restart_nodes()
        output, _ = link.flwr_run(app).communicate()
    expected = simulated_hash(document, tmp_path / "simulated")
    assert read_hash(tmp_path / "run", output + link.logs()) == expected
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count('"run_started"') == events.count('"run_resumed"') == 1


def read_hash(run: Path, log: str) -> str:
    """The hash of the model that a run has left in its folder."""
    assert (run / "report.json").exists(), log
    return str(json.loads((run / "report.json").read_text())["final"]["model_sha256"])
