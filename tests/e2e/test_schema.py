"""A table from end to end: simulated, exported, signed, rolled out and predicted by name; devices know only where theirs lies."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from edge_client.train.torch_trainer import TorchRuntime
from edge_client.wire import arrays
from edge_client.wire import schema as schemas
from models import zoo
from models.datasets import from_settings
from tests.support.awkward_table import (
    COLUMNS,
    RARE_SPELLING,
    SECRET_CELLS,
    SECRETS,
    many_codes,
    rare_texts,
    write,
)
from tests.support.cli import CACHE, report_of, run_cli, run_here
from tests.support.processes import HANGS_SECONDS
from tests.support.row_search import values_in
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

EXPERIMENT = """
[data]
dataset = "csv"
path = "{path}"
label = "outcome"
site = "site"
exclude = ["patient"]

[model]
name = "mlp"
hidden = [8]

[local]
steps = 20

[federation]
rounds = 2
runtimes = {{ litert = 1 }}
"""
SHUFFLED = ["dose", "admitted", "ward", "outcome", "code", "age"]


@dataclass(frozen=True)
class World:
    """What one table came to: its simulation `run`, a `release` of it, and a fleet that trained on it and runs the release."""

    folder: Path
    table: Path
    fleet: LocalFleet

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def release(self) -> Path:
        return self.folder / "release"

    def fedloop(self, *arguments: str | Path) -> str:
        """The output of a command of the operator, which must succeed."""
        environment = {
            "FEDLOOP_COORDINATOR": self.fleet.operator_url,
            "FEDLOOP_ADMIN_TOKEN": str(read_admin_token(self.fleet.home)),
            "FEDLOOP_RELEASE_PASSPHRASE": "correct horse",
        }
        done = run_here(*arguments, cwd=self.folder, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The table simulated and exported; the release signed and rolled out; and trained on by two devices, a site each."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "held").mkdir()
    rows = many_codes()
    table = write(folder / "held" / "all.csv", rows, COLUMNS, "utf-8-sig", ";")
    (folder / "e.toml").write_text(EXPERIMENT.format(path=table))
    for command in (
        ["simulate", folder / "e.toml", "--out", folder / "run"],
        [
            "export",
            folder / "run",
            "--name",
            "patients",
            "--precision",
            "float32",
            "--out",
            folder / "release",
        ],
    ):
        done = run_cli(*command)
        assert done.returncode == 0, done.stderr
    converted = {"FEDLOOP_CACHE_DIR": str(CACHE)}  # by the simulation
    with local_fleet(folder / "fleet", ["--allow-path", str(folder / "held")], converted) as fleet:
        for site in ("nord", "ost"):
            own = [row for row in rows if row[COLUMNS.index("site")] == site]
            path = write(folder / f"{site}.csv", own, COLUMNS[:-3] + COLUMNS[-2:], "latin-1", "|")
            options = {"kind": "csv", "path": str(path), "split": "split", "encoding": "latin-1"}
            fleet.add(site, {"data": {"csv": options}, "releases": {"trial_seconds": 1}}).start()
        world = World(folder, table, fleet)
        sign_and_publish(world)
        devices = "federation.clients_per_round=2", "federation.min_updates=2", "devices.patience_seconds=600"
        sets = [part for each in devices for part in ("--set", each)]
        world.fedloop(
            "run",
            "e.toml",
            *sets,
            "--set",
            "model.register=trained",
            "--out",
            "trained",
            "--tensorboard",
            "events",
        )
        world.fedloop("rollout", "start", "patients:1", "--phases", "100")
        until(lambda: fleet.client.get("/rollouts", limit=1)[0]["state"] == "finished")
        yield world


def sign_and_publish(world: World) -> None:
    """As docs/releases.md says, with all keys in one folder."""
    (world.folder / "online.json").write_text(world.fedloop("release", "online-keys"))
    world.fedloop("release", "keygen", "keys")
    staging = ("--staging", "stick")
    world.fedloop("release", "init", "--keys", "keys", "--online", "online.json", *staging)
    world.fedloop("release", "add", "release", *staging)
    world.fedloop("release", "sign", "--keys", "keys", *staging)
    world.fedloop("release", "publish", *staging)


def classes(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row["class"] for row in csv.DictReader(file)]


def simulated_classes(world: World) -> list[str]:
    """By name, as the simulation's own reader, its module in torch and its params give them."""
    dataset = from_settings(report_of(world.run)["experiment"]["data"], seed=7)
    assert dataset.input_shape[0] >= 40 and dataset.classes == 3
    spec = zoo.get("mlp", input_shape=dataset.input_shape, classes=3, hidden=[8])
    logits = TorchRuntime(spec.build(0), spec.loss).logits(
        arrays.read(world.run / "model.safetensors"), dataset.x
    )
    return [dataset.class_names[index] for index in np.argmax(logits, 1)]


def test_run_release_and_device_predict_a_table_by_name_as_the_simulation_does(world: World) -> None:
    new = write(world.folder / "new.csv", many_codes(), SHUFFLED, "latin-1", "|")
    schema = schemas.from_json((world.run / "schema.json").read_bytes())
    assert json.loads((world.release / "manifest.json").read_text("utf-8"))["schema"]["label"] == "outcome"
    assert report_of(world.run)["data"]["schema"]["scale"] == schema.scale == "federated"
    expected = simulated_classes(world)
    assert set(expected) == set(schema.classes)

    for model in (world.run, world.release):
        done = run_here("predict", model, new, "--encoding", "latin-1", "--out", world.folder / "here.csv")
        assert done.returncode == 0, done.stderr
        assert "on 4200 rows whose class is known" in done.stderr
        assert classes(world.folder / "here.csv") == expected
    for site in ("nord", "ost"):
        pointer = json.loads(
            (world.fleet.device_folder(site) / "state/releases/patients/pointer.json").read_bytes()
        )
        assert pointer[pointer["active"]]["version"] == 1
    predict = ["predict", new, "--encoding", "latin-1", "--out", world.folder / "edge.csv"]
    on_device = subprocess.run(
        [Path(sys.executable).parent / "fedloop-edge", *predict],
        env={**world.fleet.devices["nord"].environment, "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert on_device.returncode == 0, on_device.stderr
    assert classes(world.folder / "edge.csv") == expected

    # A version at the coordinator is named as in other commands.
    options = new, "--encoding", "latin-1", "--json"
    found = json.loads(world.fedloop("predict", "trained:1", *options))
    assert found["model"] == "trained:1"
    of_folder = json.loads(world.fedloop("predict", world.folder / "trained", *options))
    assert found["predictions"] == of_folder["predictions"]

    kept = new.read_bytes()
    done = run_here("predict", world.run, new, "--encoding", "latin-1", "--out", new)
    assert done.returncode == 2 and "is a file that is read" in done.stderr
    assert new.read_bytes() == kept
    explain = ("predict", world.run, "--explain-columns")
    done = run_here(*explain, new, "--out", world.folder / "columns.csv")
    assert done.returncode == 2 and "--explain-columns predicts nothing" in done.stderr
    done = run_here(*explain, "--encoding", "latin-1")
    assert done.returncode == 2 and "--encoding: says how a FILE is read" in done.stderr
    done = run_here(*explain, new, "--encoding", "latin-1")
    assert done.returncode == 0 and done.stderr.endswith("new.csv: 4200 rows can be predicted\n")


def test_devices_read_their_tables_by_the_runs_schema(world: World) -> None:
    """Their configuration says where the table lies, and nothing of its columns."""
    report = report_of(world.folder / "trained")
    assert any((world.folder / "events" / "trained").iterdir())
    assert any("scaled by the means and deviations of 2 devices" in each for each in report["notices"])
    assert [(each["accepted"], each["rejected"]) for each in report["rounds"]] == [(2, 0)] * 2
    assert schemas.from_json((world.folder / "trained" / "schema.json").read_bytes()).label == "outcome"


def test_no_rare_value_leaves_its_table(world: World, tmp_path: Path) -> None:
    """No patient, rare code or extreme of one row is in the run folders, the release, the coordinator or the devices' state."""
    rows = many_codes()
    assert RARE_SPELLING in rare_texts(rows)
    texts, numbers = [*rare_texts(rows), *SECRET_CELLS], list(SECRETS.values())
    for folder in ("run", "trained"):
        schema = schemas.from_json((world.folder / folder / "schema.json").read_bytes())
        scaled = {column.name: (column.mean, column.deviation) for column in schema.columns}
        numbers += [(value - scaled[name][0]) / scaled[name][1] for name, value in SECRETS.items()]
    registered = world.fleet.client.get("/versions/trained")["files"]
    assert all((world.fleet.home / "blobs" / each["sha256"]).is_file() for each in registered)

    for published in ("run", "release", "stick", "trained", "fleet"):
        assert values_in(world.folder / published, texts, numbers) == []

    assert values_in(world.folder / "held", texts, numbers) == ["all.csv: text"]
    forms = {
        "utf-16": SECRET_CELLS[0].encode("utf-16-le"),
        "escape": json.dumps({"code": texts[-9]}).encode(),
        "float": np.float32(numbers).tobytes(),
        "double": np.array(numbers[:1], ">f8").tobytes(),
        "decimal": json.dumps(numbers[-1:]).encode(),
        "packed": gzip.compress(texts[0].encode()),
    }
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
    found = {line.partition(":")[0].removesuffix("!gzip") for line in values_in(tmp_path, texts, numbers)}
    assert found == set(forms)


def until(holds: Callable[[], bool]) -> None:
    wait_until(holds, seconds=HANGS_SECONDS)
