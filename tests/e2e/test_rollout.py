"""Real daemons and a real coordinator: a good release reaches all of them, a bad one is halted and they go back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.db.tables import events
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from edge_client.wire.rollouts import MODEL_NAME
from tests.support.released import bad_release, held_out_rows, release_folder
from tests.support.signed_releases import SignedReleases
from tests.support.stored import rows, url_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

HANGS_SECONDS = 200
CONFIG = {
    "runtimes": ["litert"],
    "data": {"digits": {"kind": "numpy", "path": "data.npz"}},
    "releases": {"trial_seconds": 2},
}


@pytest.mark.extended
def test_a_good_release_reaches_all_and_a_bad_one_is_taken_back(tmp_path: Path) -> None:
    releases = SignedReleases(tmp_path / "coordinator" / "releases")
    releases.publish(
        release_folder(tmp_path / "good", 1), bad_release(release_folder(tmp_path / "bad", 2), version=2)
    )
    with local_fleet(tmp_path) as fleet:
        for name in ("ada", "bob", "eve"):
            fleet.add(name, CONFIG, held_out_rows(name)).start()
        until(lambda: seen(fleet) == 3)

        fedloop(fleet, "rollout", "start", "digits:1", "--phases", "30,100")
        until(lambda: shown(fleet)["phases"][0]["installing"] + shown(fleet)["phases"][0]["active"] > 0)
        fleet.coordinator.kill()
        fleet.serve()
        until(lambda: shown(fleet)["state"] == "finished")
        assert active(fleet) == [1, 1, 1]

        fedloop(fleet, "rollout", "start", "digits:2", "--phases", "60,100")
        until(lambda: shown(fleet)["state"] == "rolled_back")
        result = fedloop(fleet, "rollout", "show", "digits")
        assert "the champion's" in result and "phase 1, 60 %, open: 2 rolled back" in result
        assert "phase 2, 100 %, to come: 1 waiting" in result
        assert active(fleet) == [1, 1, 1]
        assert set(fleet.stop().values()) == {0}


@pytest.mark.extended
def test_a_device_heals_from_bit_rot_and_gives_a_model_up_once_it_is_withdrawn(tmp_path: Path) -> None:
    releases = SignedReleases(tmp_path / "coordinator" / "releases")
    releases.publish(release_folder(tmp_path / "only", 1))
    with local_fleet(tmp_path) as fleet:
        daemon = fleet.add("ada", CONFIG, held_out_rows("ada"))
        daemon.start()
        until(lambda: seen(fleet) == 1)
        fedloop(fleet, "rollout", "start", "digits:1", "--phases", "100")
        until(lambda: shown(fleet)["state"] == "finished")

        folder = fleet.device_folder("ada") / "state/releases/digits"
        slot = json.loads((folder / "pointer.json").read_bytes())["active"]
        model = folder / slot / MODEL_NAME
        full = model.read_bytes()
        assert daemon.stop() == 0
        model.chmod(0o600)
        model.write_bytes(full[:1000] + bytes([full[1000] ^ 1]) + full[1001:])
        daemon.start()
        until(lambda: "release_installing" in released(fleet))
        until(lambda: shown(fleet)["phases"][0]["active"] == 1 and active(fleet) == [1])
        slot = json.loads((folder / "pointer.json").read_bytes())["active"]
        assert (folder / slot / MODEL_NAME).read_bytes() == full

        fedloop(fleet, "rollout", "abort", "digits")
        until(lambda: bool(shown(fleet)["stays"]))
        result = fedloop(fleet, "rollout", "show", "digits")
        assert "still runs it: not_withdrawn: 1 device, such as" in result and "withdraw it first" in result
        assert active(fleet) == [1]
        releases.withdraw("digits", 1)
        until(lambda: not shown(fleet)["outstanding"])
        assert "still runs it" not in fedloop(fleet, "rollout", "show", "digits")
        assert json.loads((folder / "pointer.json").read_bytes())["active"] is None
        assert not list(folder.glob(f"*/{MODEL_NAME}"))
        assert set(fleet.stop().values()) == {0}


def fedloop(fleet: LocalFleet, *args: str) -> str:
    program = Path(sys.executable).parent / "fedloop"
    environment = {"FEDLOOP_HOME": str(fleet.home), "FEDLOOP_COORDINATOR": fleet.operator_url}
    done = subprocess.run(
        [program, *args], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(fleet: LocalFleet) -> dict[str, Any]:
    """The newest rollout."""
    newest = fleet.client.get("/rollouts", limit=1)[0]["id"]
    found: dict[str, Any] = fleet.client.get(f"/rollouts/{newest}")
    return found


def released(fleet: LocalFleet) -> list[str]:
    """What happened to releases on devices, by event."""
    found = rows(url_of(fleet), select(events.c.event).where(events.c.event.startswith("release_")))
    return [each.event for each in found]


def seen(fleet: LocalFleet) -> int:
    return sum(each["last_seen_at"] is not None for each in fleet.client.get("/devices")["devices"])


def active(fleet: LocalFleet) -> list[int]:
    """Which version each device has in its active slot, as its pointer says."""
    versions = []
    for name in fleet.devices:
        pointer = json.loads((fleet.device_folder(name) / "state/releases/digits/pointer.json").read_bytes())
        versions.append(pointer[pointer["active"]]["version"])
    return versions


def until(holds: Callable[[], bool]) -> None:
    wait_until(holds, seconds=HANGS_SECONDS)
