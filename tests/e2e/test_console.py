"""The web console in a real browser, on a real coordinator with real devices."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import tomlkit

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.local_fleet import Daemon, LocalFleet, local_fleet
from coordinator.identity.setup_links import LINK_FILE
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.update import Update
from tests.support import noop
from tests.support.browser import find_browser, running
from tests.support.device_client import RawDevice
from tests.support.federation import steps_of
from tests.support.proxies import Line
from tests.support.released import bad_release, held_out_rows, release_folder
from tests.support.signed_releases import SignedReleases

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
MODEL_BYTES = 60_000
SIMULATION = """name = "small"
data.dataset = "synthetic(shape=[4], classes=2, samples=60)"
model.name = "logreg"
federation = {rounds = 2, clients = 3, clients_per_round = 3, runtimes = {torch = 1.0}}
"""
DATACENTER = [
    ("pretraining", 'name = "digits"\ntrain.steps = 300\nplan.dp = 2\nprofile = {}\n', "new"),
    ("plan", "planner = {processes = 2, measure = 0}\n", ""),
    ("compression", '[[step]]\nkind = "quantize"\nprecision = "static-int8"\n', "new"),
    ("export", 'name = "digits"\n', ""),
]
"""Kind and document of the jobs of which pictures are made, and `new` for one of the form too."""


def test_an_operators_day(tmp_path: Path) -> None:
    """By the link of the first start: enrols a device by the command shown, trains, compares, sees the coordinator killed and back, cancels,
    finds out why an update was rejected, promotes a model, revokes, verifies the audit log, signs out; and what a viewer is not shown is refused."""
    find_browser()
    with local_fleet(tmp_path / "fleet") as fleet:
        add_device(fleet, "pump-1").start()
        viewer = {"name": "vera", "password": "a viewer's password"}
        asked = {
            "url": fleet.operator_url,
            "link": (fleet.home / LINK_FILE).read_text("utf-8").strip(),
            "viewer": viewer,
            "token": read_admin_token(fleet.home),
            "experiment": experiment("first", rounds=2, register="pumps@candidate"),
            "endless": experiment("endless", rounds=100_000),
            "odd": experiment("odd", rounds=1, clients=3),
            "simulation": SIMULATION,
            "datacenter": DATACENTER,
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
                elif step["step"] == "an odd device":
                    odd = odd_device(fleet)
                elif step["step"] == "an odd update":
                    send_update_of_nan(odd)
                elif step["step"] == "verify":
                    verify(fleet, step["command"])
                elif step["step"] == "kill":
                    fleet.coordinator.kill()
                elif step["step"] == "restart":
                    fleet.serve(wait=False)
        assert page.returncode == 0, steps
        assert steps[-1] == "signed out"


@pytest.mark.extended
def test_an_operators_day_by_keyboard_alone(tmp_path: Path) -> None:
    """Enrols, trains, follows the events across a cut of the line without a gap or a duplicate, promotes, rolls out a good release and
    one that a gate halts, revokes and signs out."""
    find_browser()
    releases = SignedReleases(tmp_path / "fleet" / "coordinator" / "releases")
    good, bad = (release_folder(tmp_path / name, version) for name, version in (("good", 1), ("bad", 2)))
    releases.publish(good, bad_release(bad, version=2))
    with local_fleet(tmp_path / "fleet") as fleet, Line(_address(fleet.operator_url)) as line:
        url = "http://{}:{}".format(*line.address)
        add_device(fleet, "pump-1").start()
        asked = {
            "url": url,
            "link": url
            + (fleet.home / LINK_FILE).read_text("utf-8").strip().removeprefix(fleet.operator_url),
            "experiment": experiment("watched", rounds=2, register="pumps@candidate"),
            "pictures": os.environ.get("FEDLOOP_TEST_PICTURES"),
        }
        steps = []
        with running("keyboard.mjs", asked) as page:
            assert page.stdout is not None
            for text in page.stdout:
                step = json.loads(text)
                steps.append(step["step"])
                if step["step"] == "enrol":
                    enrol(fleet, "pump-2", step["command"]).start()
                elif step["step"] == "cut":
                    line.cut()
                elif step["step"] == "mend":
                    line.mend()
                elif step["step"] == "verify":
                    verify(fleet, step["command"])
        assert page.returncode == 0, steps
        assert steps[-1] == "signed out"


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def experiment(name: str, rounds: int, clients: int = 2, **model: Any) -> str:
    document = noop.experiment(MODEL_BYTES, rounds, clients, min_updates=2)
    return tomlkit.dumps({**document, "name": name, "model": {**document["model"], **model}})


def odd_device(fleet: LocalFleet) -> RawDevice:
    """One that could take part, and sends what no daemon would."""
    token = fleet.client.post("/tokens", {"uses": 1})["token"]
    device = RawDevice.enrol(fleet.device_url, token, fleet.folder / "odd", "odd-pump")
    assert device.check_in(noop.checkin()).status == 200
    return device


def send_update_of_nan(device: RawDevice) -> None:
    offer = device.task(noop.checkin())
    task = TaskMessage.from_json(offer["message"])
    params = arrays.decode(device.get(f"/blobs/{offer['params']['sha256']}").body)
    delta = {name: np.full_like(value, np.nan) for name, value in params.items()}
    device.upload(
        offer["task"], encode_result(task, Update(delta, noop.ROWS, steps_of(task, noop.ROWS), 0.5))
    )
    device.close()


def verify(fleet: LocalFleet, command: str) -> None:
    """Runs the command that the console shows to verify the audit log."""
    program, *arguments = shlex.split(command)
    environment = {**os.environ, "FEDLOOP_HOME": str(fleet.home), "FEDLOOP_COORDINATOR": fleet.operator_url}
    done = subprocess.run(
        [str(BIN / program), *arguments], env=environment, check=True, capture_output=True, text=True
    )
    assert "intact" in done.stdout, done.stdout


def config(folder: Path) -> dict[str, Any]:
    """Trains on rows of `data.npz`, and judges releases by those of `digits.npz`."""
    data = {"rows": "data.npz", "digits": "digits.npz"}
    return {
        "runtimes": ["torch"],
        "data": {name: {"kind": "numpy", "path": str(folder / file)} for name, file in data.items()},
        "releases": {"trial_seconds": 2},
    }


def write_data(fleet: LocalFleet, name: str) -> None:
    fleet.write_data(name, noop.rows())
    np.savez(fleet.device_folder(name) / "digits.npz", **held_out_rows(name))


def add_device(fleet: LocalFleet, name: str) -> Daemon:
    daemon = fleet.add(name, config(fleet.device_folder(name)))
    write_data(fleet, name)
    return daemon


def enrol(fleet: LocalFleet, name: str, command: str) -> Daemon:
    """The device that ran the command which the console showed."""
    folder = fleet.device_folder(name)
    folder.mkdir()
    write_data(fleet, name)
    document = {"name": name, "state_dir": str(folder / "state"), **config(folder)}
    (folder / "edge.toml").write_text(tomlkit.dumps(document))
    environment = {"FEDLOOP_EDGE_CONFIG": str(folder / "edge.toml")}
    program, *arguments = shlex.split(command)
    subprocess.run(
        [str(BIN / program), *arguments], env={**os.environ, **environment}, check=True, capture_output=True
    )
    fleet.devices[name] = Daemon(
        [str(BIN / program), "run"], fleet.folder / "logs" / f"{name}.log", environment
    )
    return fleet.devices[name]
