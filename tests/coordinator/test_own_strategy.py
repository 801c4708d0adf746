"""A user's own strategy: the guide's example in simulation, in the sandbox of a coordinator, and on daemons."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.db import runs as rows
from coordinator.demos.demo_fleet import client_data, device_config
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.experiments.strategy_choice import is_own_strategy
from coordinator.on_flower import folder as app_folder
from coordinator.on_flower import server
from coordinator.on_flower.settings import RunSettings
from coordinator.operator import run_follower
from coordinator.reports.progress import Quiet
from coordinator.runs import admission
from coordinator.runs.service import RunService
from coordinator.sandbox import enter
from coordinator.workers import own_strategy
from edge_client.wire import arrays
from strategies.params import flatten
from tests.support.fake_devices import DEVICES, answering
from tests.support.flower_grid import app_grid
from tests.support.long import LONG
from tests.support.require import require
from tests.support.services import services_in

ROOT = Path(__file__).parents[2]
EXPERIMENT: dict[str, Any] = {
    "model": {"name": "logreg"},
    "data": {"partition": "iid"},
    "federation": {"clients": 2, "rounds": 2, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1},
    "strategy": {"name": "mine:Median", "server_lr": 0.5},
    "simulation": {"workers": 1},
}
OTHERS = """
import numpy as np

class Trimmed:
    base = "fedadam"
    def __init__(self, trim=0.1):
        if not 0 <= trim < 0.5:
            raise ValueError("trim must be below a half")
    def aggregate(self, updates):
        return updates[0].delta

class Nothing: pass
class Falls:
    def aggregate(self, updates):
        return {}[len(updates)]
class Part:
    def aggregate(self, updates):
        return {"w": [[1.0]]}
class Broken:
    def aggregate(self, updates):
        return {name: value * np.nan for name, value in updates[0].delta.items()}
class Thief:
    def __init__(self, path):
        self.path = path
    def aggregate(self, updates):
        open(self.path).close()
        return updates[0].delta
class Base:
    base = "fedavgg"
    def aggregate(self, updates):
        return updates[0].delta
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's working directory with the guide's `mine.py`."""
    page = (ROOT / "docs" / "own-strategy.md").read_text("utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert len(example.splitlines()) <= 20
    (tmp_path / "mine.py").write_text(example)
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failure(name: str, **options: object) -> str:
    with pytest.raises(UserError) as raised:
        fedloop.simulate({**EXPERIMENT, "strategy": {"name": name, **options}}, out="run")
    return str(raised.value)


@pytest.mark.slow
def test_a_simulation_aggregates_by_the_guides_median_and_keeps_its_options(folder: Path) -> None:
    result = fedloop.simulate({**EXPERIMENT, "simulation": {"faults": {}, "workers": 2}}, out="run")
    assert result.report["experiment"]["strategy"] == {"name": "mine:Median", "server_lr": 0.5}
    assert result.report["rejections"] == {}
    assert result.report["final"]["test_loss"] < result.report["start"]["test_loss"]
    # The median of two is their mean; all clients have the same number of rows.
    mean = fedloop.simulate({**EXPERIMENT, "strategy": {"name": "fedavg", "server_lr": 0.5}}, out="mean")
    for name, value in mean.params.items():
        np.testing.assert_allclose(result.params[name], value, atol=1e-6)


@pytest.mark.slow
def test_a_problem_of_a_strategy_is_reported_before_the_first_round(folder: Path) -> None:
    assert "no module 'absent'" in failure("absent:Median")
    reported = failure("others:Trimmed", trimm=0.2)
    assert "strategy.trimm: fedadam has no option 'trimm'" in reported and "itself: trim" in reported
    assert (
        "others.py, line" in failure("others:Falls") and not (folder / "run" / "model.safetensors").exists()
    )
    assert "holds NaN or infinity" in failure("others:Broken")


@pytest.mark.slow
@pytest.mark.extended
def test_further_mistakes_of_a_strategy_are_reported_too(folder: Path) -> None:
    assert "mine has no function 'Mean'; it has: Median" in failure("mine:Mean")
    assert "expected a class with a method aggregate" in failure("others:Nothing")
    assert "trim must be below a half" in failure("others:Trimmed", trim=0.5)
    assert "its base 'fedavgg'" in failure("others:Base")
    assert "it replaces the mean of its base, fedadam" in failure("others:Trimmed", weighting="uniform")
    assert "tensor 'fc.bias' is missing" in failure("others:Part")


def test_an_unknown_name_says_how_to_give_ones_own() -> None:
    with pytest.raises(UserError, match=r"'medain' is unknown.* package\.module:Class"):
        experiments.resolve({"strategy": {"name": "medain"}}, "experiment")
    with pytest.raises(UserError, match=r"strategy\.trim = inf: expected finite numbers"):
        experiments.resolve({"strategy": {"name": "mine:Median", "trim": float("inf")}}, "experiment")


def test_a_worker_reads_deltas_from_an_open_file(folder: Path) -> None:
    deltas = {
        str(index): {"w": np.full((2, 2), value, np.float32)} for index, value in enumerate((1.0, 5.0, -1e9))
    }
    arrays.write(folder / "deltas", flatten(deltas))
    figures = {"num_examples": 1, "num_steps": 1, "train_loss": 0.0}
    with (folder / "deltas").open("rb") as file:
        delta = own_strategy.aggregate("mine:Median", {}, file.fileno(), [figures] * 3)
    assert delta["w"].tolist() == [[1.0, 1.0], [1.0, 1.0]] and delta["w"].dtype == np.float32


@pytest.fixture
def site(folder: Path) -> Path:
    """A folder of Python packages with one that offers the guide's strategy."""
    site = folder / "site"
    about = site / "robust-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "robust_rules.py").write_text((folder / "mine.py").read_text())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: robust\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[fedloop.strategies]\nmiddle = robust_rules:Median\nfedavg = robust_rules:Median\n"
    )
    return site


def test_an_installed_package_offers_its_strategy_under_a_short_name(
    folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    resolved = experiments.resolve({"strategy": {"name": "middle", "server_lr": 0.5}}, "experiment")
    assert resolved.strategy.options == {"server_lr": 0.5}
    assert own_strategy.describe("middle", {"server_lr": 0.5}) == {
        "base": "fedavg",
        "takes": [],
        "options": {"server_lr": 0.5},
    }
    assert not is_own_strategy("fedavg")  # a package cannot take the name of one of ours
    with services_in(folder / "home") as services:
        admission.require_code(resolved, services.settings)  # needs no permission


@pytest.mark.slow
def test_a_coordinator_runs_a_listed_strategy_in_its_workers_and_refuses_any_other(folder: Path) -> None:
    document = {**EXPERIMENT, "federation": {"rounds": 2, "clients_per_round": 3, "runtimes": {"torch": 1.0}}}
    with services_in(folder / "home", allow_code=("mine:Median",)) as services:
        service = RunService(services, answering)
        with pytest.raises(UserError, match="--allow-code others:Trimmed") as refused:
            service.create({**document, "strategy": {"name": "others:Trimmed"}})
        assert refused.value.code == "code_not_allowed"
        # Also where only the devices have rows, so that the workers have nothing to evaluate.
        of_devices = {"dataset": "vibration", "input_shape": [8], "classes": 3}
        for data in (EXPERIMENT["data"], of_devices):
            run = service.create({**document, "data": data})
            assert service.join(run, 120)
            row = services.database.read(partial(rows.find, run=run))
            assert row is not None and (row.state, row.round, row.error) == ("finished", 2, None)
        assert len(rows_of(services, run)[-1]["rejections"]) == 0
        assert rows_of(services, run)[-1]["accepted"] == len(DEVICES)


@pytest.mark.slow
def test_a_strategy_cannot_read_what_the_coordinator_keeps(folder: Path) -> None:
    if reason := enter.unavailable_reason():
        require("landlock", reason)
    with services_in(folder / "home", allow_code=("others:Thief",)) as services:
        service = RunService(services, answering)
        secret = next(path for path in (folder / "home").iterdir() if path.is_file())
        run = service.create({**EXPERIMENT, "strategy": {"name": "others:Thief", "path": str(secret)}})
        assert service.join(run, 120)
        row = services.database.read(partial(rows.find, run=run))
        assert row is not None and row.state == "failed" and row.round == 0
        assert "others:Thief" in row.error and "Permission denied" in row.error


_KEEPING: list[dict[str, Any]] = [
    {"strategy": {"name": "feddyn", "alpha": 0.1}},
    {"strategy": {"name": "rfa", "malicious": 0, "mix_neighbours": True}},
    {"strategy": {"name": "fedavg"}, "uplink": {"code": "topk", "share": 0.05, "bits": 8}},
]
KEEPING_STATE_OR_UPDATES = _KEEPING[: None if LONG else 1]
"""Fedloop's own strategies whose clients keep a state, or which need each update, and a code whose clients keep what they did not send."""


def _run_on(fleet: LocalFleet, document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The report of a run on devices."""
    run = fleet.client.post("/runs", {"experiment": document})
    return run_follower.follow(fleet.client, run["id"], folder / run["id"], Quiet())


def rows_of(services: Any, run: str) -> list[dict[str, Any]]:
    return list(services.database.read(lambda at: rows.records(at, run)))


@pytest.mark.slow
@pytest.mark.long
def test_daemons_and_nodes_of_flower_and_a_simulation_of_them_get_the_same_model(
    folder: Path, site: Path
) -> None:
    experiment = experiments.resolve(EXPERIMENT, "experiment")
    federated = []
    with local_fleet(folder / "fleet", ["--allow-code", "mine:Median"], {"PYTHONPATH": str(site)}) as fleet:
        for name in ("north", "south"):
            fleet.add(name, device_config("torch"))
        ids = fleet.ids()
        names = sorted(ids, key=lambda name: ids[name])
        for name, share in zip(names, client_data(experiment), strict=True):
            fleet.write_data(name, share)
            fleet.devices[name].start()
        for strategy in (
            "mine:Median",
            "middle",
        ):  # the second is installed at the coordinator, and needs no permission
            named = {**EXPERIMENT["strategy"], "name": strategy}
            report = _run_on(fleet, {**EXPERIMENT, "strategy": named}, folder)
            assert report["experiment"]["strategy"]["name"] == strategy
            federated.append(report)
        ours = [_run_on(fleet, {**EXPERIMENT, **each}, folder) for each in KEEPING_STATE_OR_UPDATES]
        fleet.stop()
    for tables, report in zip(KEEPING_STATE_OR_UPDATES, ours, strict=True):
        alike = {**tables, "simulation": {"engine": "pool", "names": [ids[name] for name in names]}}
        twin = fedloop.simulate({**EXPERIMENT, **alike}, out=folder / tables["strategy"]["name"]).report
        assert report["final"]["model_sha256"] == twin["final"]["model_sha256"], tables
        assert (report["bytes_up"], report.get("uplink")) == (twin["bytes_up"], twin.get("uplink")), tables
    document = {**EXPERIMENT, "simulation": {"engine": "pool", "names": [ids[name] for name in names]}}
    simulated = fedloop.simulate(document, out=folder / "simulated")
    assert [[row["accepted"] for row in report["rounds"]] for report in federated] == [[2, 2]] * 2
    same = experiments.resolve(document, "experiment")
    app_folder.write(same, folder / "app", folder / "on-flower", folder)
    on_flower = server.run(
        folder / "app", app_grid(folder / "app", 2), RunSettings((folder / "on-flower").absolute())
    )
    hashes = {report["final"]["model_sha256"] for report in (*federated, simulated.report, on_flower)}
    assert len(hashes) == 1
