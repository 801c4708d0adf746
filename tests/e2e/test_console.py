"""The web console in a real browser, on a real coordinator with real devices."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomlkit

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.local_fleet import Daemon, LocalFleet, local_fleet
from coordinator.identity.setup_links import LINK_FILE
from tests.support import noop
from tests.support.browser import find_browser, running

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
MODEL_BYTES = 60_000


def test_an_operators_day(tmp_path: Path) -> None:
    """By the link of the first start: enrols a device by the command shown, trains, compares, sees the coordinator killed and back, cancels,
    revokes, signs out; and what a viewer is not shown is refused."""
    find_browser()
    with local_fleet(tmp_path / "fleet") as fleet:
        noop.add_device(fleet, "pump-1").start()
        viewer = {"name": "vera", "password": "a viewer's password"}
        asked = {
            "url": fleet.operator_url,
            "link": (fleet.home / LINK_FILE).read_text("utf-8").strip(),
            "viewer": viewer,
            "token": read_admin_token(fleet.home),
            "experiment": experiment("first", rounds=2),
            "endless": experiment("endless", rounds=100_000),
            "pictures": os.environ.get("FEDLOOP_TEST_PICTURES"),
        }
        with running("console.mjs", asked) as page:
            assert page.stdout is not None
            steps = []
            for line in page.stdout:
                step = json.loads(line)
                steps.append(step["step"])
                if step["step"] == "signed in":  # once there is a first account, by the link
                    fleet.client.post("/users", {**viewer, "role": "viewer"})
                elif step["step"] == "enrol":
                    enrol(fleet, "pump-2", step["command"]).start()
                elif step["step"] == "kill":
                    fleet.coordinator.kill()
                elif step["step"] == "restart":
                    fleet.serve(wait=False)
        assert page.returncode == 0, steps
        assert steps[-1] == "signed out"


def experiment(name: str, rounds: int) -> str:
    document = noop.experiment(MODEL_BYTES, rounds, clients=2)
    return tomlkit.dumps({**document, "name": name})


def enrol(fleet: LocalFleet, name: str, command: str) -> Daemon:
    """The device that ran the command which the console showed."""
    folder = fleet.device_folder(name)
    folder.mkdir()
    fleet.write_data(name, noop.rows())
    config = {
        "name": name,
        "state_dir": str(folder / "state"),
        "runtimes": ["torch"],
        "data": {"rows": {"kind": "numpy", "path": str(folder / "data.npz")}},
    }
    (folder / "edge.toml").write_text(tomlkit.dumps(config))
    environment = {"FEDLOOP_EDGE_CONFIG": str(folder / "edge.toml")}
    program, *arguments = shlex.split(command)
    subprocess.run(
        [str(BIN / program), *arguments], env={**os.environ, **environment}, check=True, capture_output=True
    )
    fleet.devices[name] = Daemon(
        [str(BIN / program), "run"], fleet.folder / "logs" / f"{name}.log", environment
    )
    return fleet.devices[name]
