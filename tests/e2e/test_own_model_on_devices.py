"""A user's own model on a real fleet: made in the user's folder, which the coordinator cannot read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.demo_fleet import client_data
from coordinator.demos.local_fleet import Daemon, LocalFleet
from coordinator.experiments import experiment as experiments
from coordinator.operator.client import run_id
from edge_client.files import file_sha256
from tests.support.cli import options, report_of, run_cli
from tests.support.processes import HANGS_SECONDS
from tests.support.require import require

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "own-model.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
TORCH, KERAS = (
    next(each for each in BLOCKS if text in each) for text in ("nn.Sequential", "keras.Sequential")
)
SAVE = "from mine import build; build((8, 8), 10, width=4).save('net.keras')"
NOBODY = 65534
SETTINGS = [
    "data.partition=iid",
    "federation.clients=2",
    "federation.clients_per_round=2",
    "federation.rounds=3",
    "model.register=mine",
]
SETPRIV = shutil.which("setpriv")
WITHOUT_OTHERS_FILES = [SETPRIV or "", "--bounding-set", "-dac_override,-dac_read_search"]
"""Starts root's programs without the right to read what file permissions refuse them."""


class ConfinedFleet(LocalFleet):
    """A fleet whose coordinator reads no other user's private files, even started by root."""

    def _serve(self, operator: str, device: str) -> Daemon:
        daemon = super()._serve(operator, device)
        daemon.command = [*WITHOUT_OTHERS_FILES, *daemon.command]
        return daemon


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfinedFleet]:
    """A coordinator that runs nobody's code, and two devices."""
    if os.geteuid() != 0 or SETPRIV is None:
        require("root", "to give a folder to another user needs root and setpriv")
    fleet = ConfinedFleet(tmp_path_factory.mktemp("fleet"))
    config = {"runtimes": ["litert"], "data": {"digits": {"kind": "numpy", "path": "data.npz"}}}
    document = experiments.apply_settings({}, SETTINGS)
    try:
        fleet.serve()
        for number, share in enumerate(client_data(experiments.resolve(document, "test"))):
            fleet.add(f"device-{number}", config, share).start()
        yield fleet
    finally:
        fleet.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's own folder."""
    folder = tmp_path / "user"
    folder.mkdir()
    return folder


def close(folder: Path) -> None:
    """Gives the folder to another user, and checks that the coordinator's rights do not open it."""
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o700)
    listed = subprocess.run([*WITHOUT_OTHERS_FILES, "ls", str(folder)], capture_output=True, check=False)
    assert b"Permission denied" in listed.stderr


def environment(fleet: LocalFleet) -> dict[str, str]:
    return {"FEDLOOP_COORDINATOR": fleet.operator_url, "FEDLOOP_ADMIN_TOKEN": read_admin_token(fleet.home)}


def checked(fleet: LocalFleet, out: Path, name: str) -> dict[str, Any]:
    """The report of a run of the model `name` with these settings, once it and its version were found to be right."""
    report: dict[str, Any] = report_of(out)
    assert [row["accepted"] for row in report["rounds"]] == [2, 2, 2]
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


def test_a_torch_module_is_trained_by_devices_also_across_a_restart(fleet: LocalFleet, folder: Path) -> None:
    (folder / "mine.py").write_text(TORCH)
    close(folder)
    requested = options([*SETTINGS, "model.name=mine:build", "model.width=4"])

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
    checked(fleet, folder / "run", "mine:build")


@pytest.mark.extended
def test_a_keras_file_is_trained_by_devices_from_its_weights(fleet: LocalFleet, folder: Path) -> None:
    (folder / "mine.py").write_text(KERAS)
    made = subprocess.run(
        [sys.executable, "-c", SAVE], cwd=folder, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    close(folder)
    requested = options([*SETTINGS, f"model.name={folder / 'net.keras'}"])

    done = run_cli("run", "--out", folder / "run", *requested, cwd=folder, env=environment(fleet))

    assert done.returncode == 0, done.stderr
    report = checked(fleet, folder / "run", "net.keras")
    assert str(folder) not in str(report["experiment"])
