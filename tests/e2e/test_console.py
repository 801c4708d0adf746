"""The web console in a real browser, on a real coordinator with real devices."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import tomlkit

import fedloop
from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.local_fleet import Daemon, LocalFleet, local_fleet
from coordinator.identity.setup_links import LINK_FILE
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import EnrolRequest, TaskMessage
from strategies.update import Update
from tests.support import device_client, noop
from tests.support.browser import find_browser, running
from tests.support.device_client import RawDevice
from tests.support.federation import steps_of
from tests.support.long import LONG
from tests.support.proxies import Line
from tests.support.released import bad_release, held_out_rows, release_folder
from tests.support.signed_releases import SignedReleases
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
MODEL_BYTES = 60_000
_PATIENCE_SECONDS = 240.0
SIMULATION = """name = "small"
data.dataset = "synthetic(shape=[4], classes=2, samples=60)"
model.name = "logreg"
federation = {rounds = 2, clients = 3, clients_per_round = 3, runtimes = {torch = 1.0}}
"""
PRETRAINING = 'name = "small"\ntrain.steps = 20\nprofile = {}\n'
FORM = {
    "name": "first",
    "data.dataset": "rows",
    "data.input_shape": f"[{noop.INPUTS}]",
    "data.classes": str(noop.CLASSES),
    "model.name": "mlp",
    "model.hidden": "[29]",
    "model.register": "pumps@candidate",
    "federation.clients": "2",
    "federation.clients_per_round": "2",
    "federation.min_updates": "2",
    "federation.rounds": "2",
    "federation.runtimes": "{ torch = 1.0 }",
    "local.steps": "1",
    "local.batch_size": "1",
    "local.lr": "0.001",
}
"""A run of `noop` by the inputs of the form."""
VIEWER = {"name": "vera", "password": "a viewer's password"}


@dataclass
class Site:
    """A coordinator with its devices, and what one flow leaves to the next."""

    fleet: LocalFleet
    password: str = "correct horse battery"
    odd: list[RawDevice] = field(default_factory=list)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator with one device, and signed releases: every second one is bad."""
    find_browser()
    releases = SignedReleases(tmp_path / "fleet" / "coordinator" / "releases")
    folders = [release_folder(tmp_path / f"release-{version}", version) for version in range(1, 6)]
    for version in (2, 4):
        bad_release(folders[version - 1], version=version)
    releases.publish(*folders)
    with local_fleet(tmp_path / "fleet") as fleet:
        add_device(fleet, "pump-1").start()
        yield Site(fleet)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_operators_day(site: Site) -> None:
    """With the mouse, then with the keyboard alone: enrols a device by the command shown, starts runs from the form, compares them,
    promotes, rolls out a good release and one that a gate halts, loses the coordinator or the line to it and misses no event, finds
    out why an update was rejected, revokes, verifies the audit log, signs out. Then every view by axe, and what a viewer is not shown
    is refused. The short edition uses the keyboard wherever the mouse was used, but waits once for devices only."""
    with_mouse(site)
    with_keyboard(site)
    privacy(site.fleet)
    every_view(site)


def with_mouse(site: Site) -> None:
    fleet = site.fleet
    requested = {
        "url": fleet.operator_url,
        "link": (fleet.home / LINK_FILE).read_text("utf-8").strip(),
        "token": read_admin_token(fleet.home),
        "password": site.password,
        "form": FORM,
        "endless": experiment("endless", rounds=100_000),
        "odd": experiment("odd", rounds=1, clients=3),
        "simulation": SIMULATION,
    }

    def respond(step: dict[str, Any]) -> None:
        match step["step"]:
            case "signed in":  # once there is a first account, by the link
                fleet.client.post("/users", {**VIEWER, "role": "viewer"})
            case "enrol":
                enrol(fleet, "pump-2", step["command"]).start()
            case "an odd device":
                site.odd.append(odd_device(fleet))
            case "an odd update":
                send_update_of_nan(site.odd[0])
            case "verify":
                verify(fleet, step["command"])
            case "kill":
                fleet.coordinator.kill()
            case "restart":
                fleet.serve(wait=False)
            case "changed the password":
                site.password = step["password"]

    follow("console.mjs", requested, respond, last="signed out")


def with_keyboard(site: Site) -> None:
    fleet = site.fleet
    fleet.client.post("/jobs", {"kind": "pretraining", "document": PRETRAINING})
    with Line(_address(fleet.operator_url)) as line:
        requested = {
            "url": "http://{}:{}".format(*line.address),
            "password": site.password,
            "experiment": experiment("watched", rounds=2, register="pumps@candidate"),
            "odd": experiment("odd", rounds=2, clients=3),
            "brief": not LONG,
        }

        def respond(step: dict[str, Any]) -> None:
            match step["step"]:
                case "enrol":
                    enrol(fleet, "pump-3", step["command"]).start()
                case "an odd update":
                    send_update_of_nan(site.odd[0])
                case "cut":
                    line.cut()
                case "mend":
                    line.mend()
                case "verify":
                    verify(fleet, step["command"])

        follow("keyboard.mjs", requested, respond, last="signed out")


def privacy(fleet: LocalFleet) -> None:
    """A run that its budget has ended, and one that waits for more devices while its budget suffices for two of four rounds."""
    budget = (
        fedloop.epsilon(noise_multiplier=2.0, rounds=2, cohort=2, clients=2, sampling="none").epsilon + 0.01
    )
    spent = noop.start(fleet, private("spent", budget))
    assert len(noop.finish(fleet.client, spent)) == 2
    nearly = noop.start(fleet, private("nearly", budget, clients=9))
    wait_until(lambda: fleet.client.get(f"/runs/{nearly}")["state"] == "running", seconds=_PATIENCE_SECONDS)
    told = fleet.client.get(f"/runs/{spent}/privacy")
    requested = {
        "url": fleet.operator_url,
        "token": read_admin_token(fleet.home),
        "ids": {"spent": spent, "nearly": nearly},
        "expected": {
            "spent": f"{told['epsilon']:.4g}",
            "budget": f"{budget:.4g}",
            "in_words": told["in_words"],
            "devices": [
                (each["name"], f"{each['epsilon']:.4g}")
                for each in fleet.client.get(f"/runs/{spent}/privacy/devices")["devices"]
            ],
        },
    }
    follow("privacy.mjs", requested, lambda step: None, last="before a run")
    fleet.client.post(f"/runs/{nearly}/cancel")


def private(name: str, budget: float, clients: int = 2) -> dict[str, Any]:
    """A run of four rounds."""
    document = noop.experiment(MODEL_BYTES, 4, clients, min_updates=1)
    document["devices"] = {"patience_seconds": 600}
    table = {"mechanism": "central", "clip_norm": 0.5, "noise_multiplier": 2.0, "budget": budget}
    return {**document, "name": name, "privacy": table}


def every_view(site: Site) -> None:
    fleet = site.fleet
    requested = {
        "url": fleet.operator_url,
        "admin": {"name": "ada", "password": site.password},
        "viewer": VIEWER,
        "ids": resources(fleet),
    }
    follow("views.mjs", requested, lambda step: None, last="a viewer")


def resources(fleet: LocalFleet) -> dict[str, str]:
    """Something of each kind in the states that have buttons, by the names of path parameters and of views."""
    client = fleet.client
    ask_for_approval(fleet)
    started = client.post("/rollouts", {"model": "digits", "version": 5, "phases": [50, 100]})["id"]
    client.post(f"/rollouts/{started}/pause")
    runs = {each["name"]: each["id"] for each in client.get("/runs")}
    jobs = {each["kind"]: each for each in client.get("/jobs")}
    while (job := client.get(f"/jobs/{jobs['pretraining']['id']}"))["state"] != "finished":
        assert job["state"] in ("queued", "running"), job
        time.sleep(0.2)
    stopped = client.post("/jobs", {"kind": "plan", "document": "planner = {processes = 2, measure = 0}\n"})[
        "id"
    ]
    client.post(f"/jobs/{stopped}/cancel")
    endless = client.post("/runs", {"experiment": experiment("endless", rounds=100_000)})["id"]
    halted = next(each["id"] for each in client.get("/rollouts") if each["version"] == 2)
    return {
        "device": fleet.ids()["pump-1"],
        "run": endless,
        "finished": runs[FORM["name"]],
        "cancelled": runs["endless"],
        "simulation": jobs["simulation"]["id"],
        "job": jobs["pretraining"]["id"],
        "stopped": stopped,
        "rollout": started,
        "halted": halted,
        "name": "pumps",
        "user": VIEWER["name"],
        "project": "clinic-a",
    }


def ask_for_approval(fleet: LocalFleet) -> None:
    """A device that waits until a person approves it, and has no certificate yet."""
    token = fleet.client.post("/tokens", {"needs_approval": True})["token"]
    stranger = device_client.line(fleet.device_url, device_client.fetched_ca(fleet.device_url))
    requested = EnrolRequest(token, device_client.csr(device_client.new_key()), "pending-pump")
    answer = stranger.send(device_client.request("POST", "/enrol", device_client.message(requested)))
    stranger.close()
    assert answer.status == 200, answer


def follow(
    script: str, requested: dict[str, Any], respond: Callable[[dict[str, Any]], None], *, last: str
) -> None:
    """Runs a script of `web/e2e` to its `last` step, and does outside of the browser what each step asks for."""
    pictures = os.environ.get("FEDLOOP_TEST_PICTURES")
    steps = []
    with running(script, {**requested, "pictures": pictures}) as page:
        assert page.stdout is not None
        for line in page.stdout:
            step = json.loads(line)
            steps.append(step["step"])
            respond(step)
    assert page.returncode == 0, (script, steps)
    assert steps[-1] == last


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
