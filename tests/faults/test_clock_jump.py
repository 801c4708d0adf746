"""Clocks that jump, by libfaketime under real processes: nobody is locked out, and a wrong clock is told clearly.

Each process reads how far its clock is off from a file, so a clock jumps when the file changes. Monotonic clocks
are left alone, as they are when somebody sets a machine's time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.demos.local_fleet import (
    Daemon,
    LocalFleet,
    local_fleet,
)
from edge_client.files import write_durably
from tests.support.arena import DATASET, Arena, experiment, readings
from tests.support.long import LONG
from tests.support.require import require

pytestmark = pytest.mark.slow

FLEET = 20 if LONG else 2
JUMP_DAYS = 45
WAIT_SECONDS = 400.0
EDGE = Path(sys.executable).parent / "fedloop-edge"


def clock(file: Path, off: str = "+0") -> dict[str, str]:
    """Environment of processes whose clock is off by what the file says."""
    set_clock(file, off)
    return {
        "LD_PRELOAD": str(_library()),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",  # seconds until the file is looked at again
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": str(_sleeping(file.parent)),
    }


def _sleeping(folder: Path) -> Path:
    """Where Python finds a `time.sleep` that works under libfaketime.

    Its own sleeps until a moment of the monotonic clock, from which libfaketime 0.9.10 subtracts a date even though
    that clock is not to be faked; the kernel then calls the moment invalid.
    """
    hook = folder / "sitecustomize.py"
    hook.write_text(
        "import select, time\ntime.sleep = lambda seconds: select.select((), (), (), seconds) and None\n"
    )
    return folder


def set_clock(file: Path, off: str) -> None:
    """Such as `+45d`, or `-24h`."""
    write_durably(file, off.encode())


def _library() -> Path:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        require("faketime", "no libfaketimeMT.so.1; apt-get install faketime")
    return found[0]


@pytest.fixture
def clocks(tmp_path: Path) -> Path:
    folder = tmp_path / "clocks"
    folder.mkdir()
    return folder


def added(fleet: LocalFleet, name: str, seed: int = 0) -> Daemon:
    """A LiteRT device with data of its own, not yet started."""
    data = {DATASET: {"kind": "numpy", "path": "data.npz"}}
    daemon = fleet.add(name, {"runtimes": ["litert"], "data": data})
    fleet.write_data(name, readings(seed))
    return daemon


def run_on(fleet: LocalFleet, cohort: int) -> dict[str, Any]:
    """The report of a run of one round of so many devices."""
    document = experiment(cohort)
    document["federation"]["runtimes"] = {"litert": 1.0}
    run = fleet.client.post("/runs", {"experiment": document})
    return Arena(fleet).finished(run["id"])


def devices_of(fleet: LocalFleet) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.client.get("/devices?limit=1000")["devices"]
    return found


def wait_until(holds: Callable[[], bool], reported: Callable[[], str]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, reported()
        time.sleep(0.2)


@pytest.fixture
def fleet_of_devices(
    tmp_path: Path, clocks: Path, served_on: Mapping[str, str]
) -> Iterator[tuple[LocalFleet, list[Daemon]]]:
    """A coordinator and its daemons, all by one clock."""
    environment = {**clock(clocks / "all"), **served_on}
    with local_fleet(tmp_path / "fleet", environment=environment) as fleet:
        with ThreadPoolExecutor(2) as pool:  # a start costs a second of a core
            daemons = list(pool.map(lambda at: added(fleet, f"device-{at}", at), range(FLEET)))
        for daemon in daemons:
            daemon.start()
        yield fleet, daemons


@pytest.mark.long
def test_a_fleet_comes_back_untouched_after_45_days(
    fleet_of_devices: tuple[LocalFleet, list[Daemon]], clocks: Path
) -> None:
    fleet, daemons = fleet_of_devices
    wait_until(lambda: all(each["last_seen_at"] for each in devices_of(fleet)), lambda: _reported(daemons))
    pids = [daemon.pid for daemon in daemons]
    before = {each["id"]: each["certificate_until"] for each in devices_of(fleet)}
    assert len(before) == FLEET

    set_clock(clocks / "all", f"+{JUMP_DAYS}d")

    then = datetime.now(UTC) + timedelta(days=JUMP_DAYS)
    assert all(datetime.fromisoformat(until) < then for until in before.values()), "expired, all of them"
    wait_until(
        lambda: all(datetime.fromisoformat(each["certificate_until"]) > then for each in devices_of(fleet)),
        lambda: _reported(daemons),
    )
    (line,) = run_on(fleet, FLEET)["rounds"]
    assert line["accepted"] == FLEET
    assert [daemon.pid for daemon in daemons] == pids
    assert all(daemon.is_running() for daemon in daemons)
    assert {each["id"] for each in devices_of(fleet)} == set(before)


def _reported(daemons: list[Daemon]) -> str:
    return "\n".join(daemon.tail(3) for daemon in daemons)


@pytest.fixture
def one(tmp_path: Path, clocks: Path, served_on: Mapping[str, str]) -> Iterator[tuple[LocalFleet, Daemon]]:
    """A coordinator by the true clock, and a daemon by one of its own."""
    with local_fleet(tmp_path / "fleet", environment=served_on) as fleet:
        daemon = added(fleet, "device")
        daemon.environment = {**daemon.environment, **clock(clocks / "one")}
        daemon.start()
        wait_until(lambda: bool(devices_of(fleet)[0]["last_seen_at"]), lambda: _reported([daemon]))
        yield fleet, daemon


@pytest.mark.extended
def test_a_clock_a_day_behind_is_reported_and_works_again_when_mended(
    one: tuple[LocalFleet, Daemon], clocks: Path
) -> None:
    """The coordinator's certificate is not valid yet by that clock, so nothing can be asked of it."""
    fleet, daemon = one
    identity = _identity(fleet)
    daemon.stop()
    set_clock(clocks / "one", "-24h")
    daemon.start()
    wait_until(lambda: "clock" in _status(daemon)["words"], lambda: json.dumps(_status(daemon)))
    words = _status(daemon)["words"]
    assert "24 h behind" in words
    doctor = _edge(daemon, "doctor")
    assert doctor.returncode == 1, doctor.stdout
    assert "24 h behind" in doctor.stdout
    assert "Traceback" not in doctor.stdout + doctor.stderr + daemon.tail(1000)
    assert daemon.is_running()
    assert _identity(fleet) == identity

    set_clock(clocks / "one", "+0")
    daemon.stop()
    daemon.start()
    assert run_on(fleet, 1)["rounds"][0]["accepted"] == 1
    assert _identity(fleet) == identity


@pytest.mark.extended
def test_a_clock_a_day_ahead_is_reported_and_does_no_damage(
    one: tuple[LocalFleet, Daemon], clocks: Path
) -> None:
    """Certificates are valid on either day, so the device goes on, by the coordinator's clock."""
    fleet, daemon = one
    identity = _identity(fleet)
    set_clock(clocks / "one", "+24h")
    assert run_on(fleet, 1)["rounds"][0]["accepted"] == 1
    wait_until(
        lambda: any("24 h ahead" in note for note in _status(daemon)["notes"]),
        lambda: json.dumps(_status(daemon)),
    )
    doctor = _edge(daemon, "doctor")
    assert "24 h ahead" in doctor.stdout
    assert "Traceback" not in doctor.stdout + doctor.stderr + daemon.tail(1000)
    assert _identity(fleet) == identity, "nothing was renewed for a date that nobody vouched for"


@pytest.mark.extended
def test_a_clock_that_jumps_far_ahead_alone_renews_nothing_by_itself(
    one: tuple[LocalFleet, Daemon], clocks: Path
) -> None:
    """By its own clock the certificate is long over; the coordinator's says otherwise, and is believed."""
    fleet, daemon = one
    until = devices_of(fleet)[0]["certificate_until"]
    set_clock(clocks / "one", f"+{JUMP_DAYS}d")
    assert run_on(fleet, 1)["rounds"][0]["accepted"] == 1
    wait_until(
        lambda: any("ahead" in note for note in _status(daemon)["notes"]), lambda: str(_status(daemon))
    )
    assert devices_of(fleet)[0]["certificate_until"] == until
    assert daemon.is_running()


def _identity(fleet: LocalFleet) -> str:
    """Which of its identities the device uses."""
    return str((fleet.device_folder("device") / "state" / "identity").readlink())


def _status(daemon: Daemon) -> dict[str, Any]:
    done = _edge(daemon, "status", "--json")
    assert done.returncode == 0, done.stderr
    status: dict[str, Any] = json.loads(done.stdout)
    return {"words": "", "notes": [], **status}


def _edge(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The device's own command, by its own clock."""
    return subprocess.run(
        [EDGE, *arguments],
        env={**os.environ, **daemon.environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
