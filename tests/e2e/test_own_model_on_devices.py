"""A user's own model on a real fleet: made in the user's folder, which the coordinator cannot read."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.demo_fleet import client_data
from coordinator.demos.local_fleet import LocalFleet
from coordinator.experiments import experiment as experiments
from coordinator.operator.client import run_id
from edge_client.files import file_sha256
from tests.support.cli import options, report_of, run_cli, run_here
from tests.support.keras_nets import cnn
from tests.support.other_user import is_closed, other_users_fleet
from tests.support.processes import HANGS_SECONDS

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "own-model.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
TORCH = next(each for each in BLOCKS if "nn.Sequential" in each)
SETTINGS = [
    "data.partition=iid",
    "federation.clients=2",
    "federation.clients_per_round=2",
    "model.register=mine",
]
ONE_ROUND = ["federation.rounds=1", "local.epochs=10", "local.lr=0.1"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[LocalFleet]:
    """The coordinator of another user, which runs nobody's code, and two devices."""
    config = {"runtimes": ["litert"], "data": {"digits": {"kind": "numpy", "path": "data.npz"}}}
    document = experiments.apply_settings({}, SETTINGS)
    with other_users_fleet() as fleet:
        fleet.serve()
        for number, share in enumerate(client_data(experiments.resolve(document, "test"))):
            fleet.add(f"device-{number}", config, share).start()
        yield fleet


@pytest.fixture
def folder() -> Iterator[Path]:
    """A user's own folder, which nothing but its mode keeps from others."""
    with tempfile.TemporaryDirectory(prefix="fedloop-user-") as name:
        yield Path(name)


def environment(fleet: LocalFleet) -> dict[str, str]:
    return {"FEDLOOP_COORDINATOR": fleet.operator_url, "FEDLOOP_ADMIN_TOKEN": read_admin_token(fleet.home)}


def checked(fleet: LocalFleet, out: Path, name: str, rounds: int) -> dict[str, Any]:
    """The report of a run of the model `name` with these settings, once it and its version were found to be right."""
    report: dict[str, Any] = report_of(out)
    assert [row["accepted"] for row in report["rounds"]] == [2] * rounds
    assert report["runtimes"] == {"litert": 2}
    assert report["final"]["test_accuracy"] > report["start"]["test_accuracy"] + 0.2
    assert report["final"]["model_sha256"] == file_sha256(out / "model.safetensors")
    assert any("only LiteRT devices take part" in notice for notice in report["notices"])
    version = fleet.client.get("/versions/mine")
    made_from = version["about"]["model"]["made_from"]
    assert made_from == report["own_model"] and len(made_from) == 3
    assert version["about"]["model"]["name"] == name
    assert all(
        (fleet.home / "blobs" / made_from[f"{each}_sha256"]).is_file() for each in ("artifact", "manifest")
    )
    return report


def test_a_torch_module_is_trained_though_the_coordinator_cannot_read_its_folder(
    fleet: LocalFleet, folder: Path
) -> None:
    (folder / "mine.py").write_text(TORCH)
    assert is_closed(folder) and not is_closed(fleet.home)
    requested = options([*SETTINGS, *ONE_ROUND, "model.name=mine:build", "model.width=4"])

    done = run_cli("run", "--out", folder / "run", *requested, cwd=folder, env=environment(fleet))

    assert done.returncode == 0, done.stderr
    checked(fleet, folder / "run", "mine:build", rounds=1)


@pytest.mark.extended
def test_a_keras_file_is_trained_from_its_weights_though_the_coordinator_cannot_read_it(
    fleet: LocalFleet, folder: Path
) -> None:
    cnn().save(folder / "net.keras")
    assert is_closed(folder) and not is_closed(fleet.home)
    requested = options([*SETTINGS, *ONE_ROUND, f"model.name={folder / 'net.keras'}"])

    done = run_here("run", "--out", folder / "run", *requested, cwd=folder, env=environment(fleet))

    assert done.returncode == 0, done.stderr
    report = checked(fleet, folder / "run", "net.keras", rounds=1)
    assert str(folder) not in str(report["experiment"])


@pytest.mark.extended
def test_a_run_of_an_own_model_goes_on_after_a_restart(fleet: LocalFleet, folder: Path) -> None:
    (folder / "mine.py").write_text(TORCH)
    requested = options([*SETTINGS, "federation.rounds=3", "model.name=mine:build", "model.width=4"])

    begun = run_cli("run", "--detach", *requested, cwd=folder, env=environment(fleet))
    assert begun.returncode == 0, begun.stderr
    run, end = begun.stdout.strip(), time.monotonic() + HANGS_SECONDS
    while not (shown := fleet.client.get(f"/runs/{run_id(fleet.client, run)}"))["round"]:
        assert shown["error"] is None and time.monotonic() < end, shown
        time.sleep(0.05)
    fleet.coordinator.kill()
    fleet.serve()
    done = run_cli("run", "--follow", run, "--out", folder / "run", cwd=folder, env=environment(fleet))

    assert done.returncode == 0, done.stderr
    checked(fleet, folder / "run", "mine:build", rounds=3)
