"""`fedloop device why`, the command, over a fleet in which every device stands somewhere else.

One run, open in its first round. Four devices are daemons whose owners set something; the others say for
themselves what they are, and answer as a device would that is in that situation. Time that must have passed is
written into rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from coordinator.db.tables import devices, tasks
from coordinator.demos.local_fleet import LocalFleet
from edge_client.eligibility import Conditions, Readings, ineligible
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import Decline, TaskMessage
from strategies.update import Update
from tests.support.arena import Arena, arena, experiment, honest_config, readings
from tests.support.cli import assert_refused, run_here
from tests.support.device_client import RawDevice
from tests.support.federation import steps_of
from tests.support.hostile_results import TENSORS
from tests.support.processes import HANGS_SECONDS
from tests.support.stored import change, rows, url_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

EDGE = Path(sys.executable).parent / "fedloop-edge"
GROUP, SITE, MEMORY_BYTES = "ward", "north", 2**29
COHORT = 6

ON_BATTERY = ineligible(Conditions(on_ac_power=True), Readings(on_ac_power=False, battery_percent=41))

KEPT_OUT = {
    "on battery": ("ineligible", "ineligible: on battery (41 %), conditions.on_ac_power is set"),
    "low disk": ("ineligible", "MB of disk free, conditions.min_free_disk_bytes asks for"),
    "paused": ("ineligible", "ineligible: paused by hand"),
    "opted out": ("opted_out", "its owner opted out of this run"),
    "other runtime": ("wrong_runtime", "it has litert, the run wants torch"),
    "small": ("memory", "it offers 256 MiB of memory, the run wants 512 MiB"),
    "elsewhere": ("group", "it is in group 'garden', the run wants ward"),
    "unlabelled": ("labels", "its label site is missing, the run wants 'north'"),
    "without data": ("no_dataset", "dataset 'readings' is not configured on it"),
    "without model": ("no_model", "model 'logreg' is not installed on it for torch"),
    "old": ("wire_version", "it speaks wire 0.9"),
    "unapproved": ("pending", "its enrolment waits for approval: `fedloop device approve`"),
    "revoked": ("revoked", "it was revoked"),
    "gone": ("left", "it left the federation"),
    "expired": ("certificate_expired", "its certificate expired on 2026-01-05 12:00 UTC"),
    "silent": ("never_seen", "it enrolled but never checked in"),
    "long ago": ("not_seen", "it was last seen on 2026-01-05 12:00:00 UTC"),
}
"""Device -> code and words; none of these may be chosen."""

FROM_EVERY_RUN = {"pending", "revoked", "left", "certificate_expired", "never_seen", "not_seen"}
"""Codes of what keeps a device from any run, whatever that wants."""

ASKED = {
    "not chosen": ("not_chosen", "not selected in round 1: the cohort had 6 of 7 devices"),
    "waited for": ("asked", "selected in round 1; its task waits for its next check-in"),
    "training": ("training", "it works on round 1; it must check in by"),
    "accepted": ("accepted", "its update of round 1 was accepted at 20"),
    "rejected": ("rejected", "its update of round 1 was rejected: "),
    "declined": ("declined", "it declined round 1: its data are being moved"),
    "given up": (
        "lease_expired",
        "its task of round 1 expired: it was silent for longer than its lease",
    ),
}
"""What becomes of a device that may be chosen -> code and words. Which device it is, the draw decides."""

LONG_AGO = datetime(2026, 1, 5, 12, tzinfo=UTC)


@dataclass
class Ward:
    """`names`: what a device is called that stands in a situation."""

    arena: Arena
    tokens: dict[str, str] = field(default_factory=dict)
    raw: dict[str, RawDevice] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    run: str = ""

    @property
    def fleet(self) -> LocalFleet:
        return self.arena.fleet

    def enrol(self, name: str, group: str = GROUP) -> RawDevice:
        if group not in self.tokens:
            made = self.fleet.client.post("/tokens", {"uses": 100, "group": group})
            self.tokens[group] = made["token"]
        folder = self.fleet.folder / "raw" / name
        device = RawDevice.enrol(self.fleet.device_url, self.tokens[group], folder, name)
        self.arena.raw.append(device)
        self.raw[name] = device
        return device

    def check_in(self, name: str, **changed: Any) -> RawDevice:
        """A device that says what the run wants to hear, but for what is changed."""
        device = self.raw.get(name) or self.enrol(name)
        assert device.check_in(self._checkin(**changed)).status == 200
        return device

    def task(self, device: RawDevice) -> dict[str, Any]:
        """Fetches the device's task."""
        return device.task(self._checkin())

    def daemon(self, name: str, *commands: str, **config: Any) -> None:
        """A daemon that could take part but for this configuration, or for what these commands told it."""
        full = {**honest_config(), "labels": {"site": SITE}, **config}
        daemon = self.fleet.add(name, full, readings(), group=GROUP)
        environment = {**os.environ, **daemon.environment}
        for command in commands:
            subprocess.run([EDGE, *command.split()], env=environment, check=True, timeout=HANGS_SECONDS)
        daemon.start()

    def change(self, name: str, **values: Any) -> None:
        """Columns of the device's row."""
        change(url_of(self.fleet), update(devices).where(devices.c.name == name).values(**values))

    def fedloop(self, *args: str) -> subprocess.CompletedProcess[str]:
        home = {"FEDLOOP_HOME": str(self.fleet.home), "FEDLOOP_COORDINATOR": self.fleet.operator_url}
        return run_here(*args, env=home)

    def why(self, situation: str, *flags: str) -> str:
        done = self.fedloop("device", "why", self.names.get(situation, situation), *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _checkin(self, **changed: Any) -> Any:
        return self.arena.checkin(**{"labels": {"site": SITE}, **changed})


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    with arena(tmp_path_factory.mktemp("why")) as made:
        ward = Ward(made)
        start_daemons(ward)
        able = [ward.check_in(f"able-{at}") for at in range(COHORT + 1)]
        keep_out(ward)
        until(lambda: all(each["last_seen_at"] for each in daemons_of(ward)), "the daemons do not check in")
        ward.run = start_run(ward)
        answer(ward, able)
        let_time_pass(ward)
        yield ward


def start_daemons(ward: Ward) -> None:
    ward.daemon("low disk", conditions={"min_free_disk_bytes": 10**18})
    ward.daemon("paused", "pause")
    ward.daemon("opted out", "opt-out ward")
    ward.daemon("other runtime", runtimes=["litert"])


def daemons_of(ward: Ward) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = ward.fleet.client.get("/devices", limit=1000)["devices"]
    return [each for each in found if each["name"] in ward.fleet.devices]


def keep_out(ward: Ward) -> None:
    """All that are no daemons, by what they say or what a person does."""
    ward.enrol("elsewhere", "garden")
    ward.check_in("elsewhere")
    ward.check_in("on battery", ineligible=ON_BATTERY)
    ward.check_in("small", memory_bytes=MEMORY_BYTES // 2)
    ward.check_in("unlabelled", labels={})
    ward.check_in("without data", datasets={})
    ward.check_in("without model", models=())
    ward.check_in("old")
    ward.check_in("unapproved")
    ward.check_in("revoked")
    ward.check_in("expired")
    ward.check_in("long ago")
    ward.enrol("silent")
    assert ward.check_in("gone").post("/leave", {}).status == 200
    assert ward.fedloop("device", "revoke", "revoked").returncode == 0
    report = rows(url_of(ward.fleet), select(devices.c.report).where(devices.c.name == "old"))[0].report
    ward.change("old", report={**report, "wire": "0.9"})
    ward.change("unapproved", state="pending")
    ward.change("expired", certificate_until=LONG_AGO)
    ward.change("long ago", last_seen_at=LONG_AGO, expected_at=LONG_AGO + timedelta(hours=1))


def start_run(ward: Ward) -> str:
    """A run whose first round has begun; its id."""
    wants = {"groups": [GROUP], "labels": {"site": SITE}, "memory_bytes": MEMORY_BYTES}
    document = {**experiment(COHORT, **wants), "name": "ward"}
    run = str(ward.fleet.client.post("/runs", {"experiment": document})["id"])
    until(lambda: len(tasks_of(ward, run)) == COHORT, "no round begins")
    return run


def tasks_of(ward: Ward, run: str) -> dict[str, str]:
    """State of its task by device."""
    query = select(tasks.c.device, tasks.c.state).where(tasks.c.run == run)
    return {row.device: row.state for row in rows(url_of(ward.fleet), query)}


def answer(ward: Ward, able: list[RawDevice]) -> None:
    """Each of the cohort does something else."""
    cohort = tasks_of(ward, ward.run)
    (left_out,) = [device for device in able if device.id not in cohort]
    waited_for, training, accepted, rejected, declined, given_up = (
        device for device in able if device.id in cohort
    )
    ward.task(training)
    ward.task(given_up)
    expire(ward, given_up)
    assert sent(ward, accepted, 0.1).status == 200
    assert sent(ward, rejected, np.nan).code == "non_finite"
    given_back = Decline("no_data", "its data are being moved")
    assert declined.post(f"/tasks/{ward.task(declined)['task']}/decline", given_back).status == 200
    until(lambda: tasks_of(ward, ward.run)[given_up.id] == "expired", "the lease does not expire")
    roles = (left_out, waited_for, training, accepted, rejected, declined, given_up)
    called = {device.id: name for name, device in ward.raw.items()}
    ward.names = {role: called[device.id] for role, device in zip(ASKED, roles, strict=True)}


def sent(ward: Ward, device: RawDevice, value: float) -> Any:
    """What is answered to an update of nothing but this value."""
    offer = ward.task(device)
    delta = {name: np.full(shape, value, np.float32) for name, shape in TENSORS.items()}
    task = TaskMessage.from_json(offer["message"])
    payload = encode_result(task, Update(delta, 10, steps_of(task, 10), 0.5))
    return device.upload(offer["task"], payload)


def expire(ward: Ward, device: RawDevice) -> None:
    """Its lease has run out."""
    leased = (tasks.c.run == ward.run, tasks.c.device == device.id)
    change(url_of(ward.fleet), update(tasks).where(*leased).values(leased_until=LONG_AGO))


def let_time_pass(ward: Ward) -> None:
    """Nobody of the others becomes overdue however long the tests take, and no lease runs out."""
    later = datetime.now(UTC) + timedelta(hours=1)
    here = (devices.c.name != "long ago", devices.c.expected_at.is_not(None))
    change(url_of(ward.fleet), update(devices).where(*here).values(expected_at=later))
    live = tasks.c.state.in_(("waiting", "leased"))
    change(url_of(ward.fleet), update(tasks).where(live).values(leased_until=later))


def until(holds: Callable[[], bool], otherwise: str) -> None:
    wait_until(holds, lambda: otherwise, HANGS_SECONDS)


@pytest.mark.parametrize("situation", KEPT_OUT)
def test_reasons_that_exclude_a_device_are_reported(ward: Ward, situation: str) -> None:
    code, words = KEPT_OUT[situation]
    result = json.loads(ward.why(situation, "--json"))
    (run,) = result["runs"]
    assert [each["code"] for each in result["reasons"]] == ([code] if code in FROM_EVERY_RUN else [])
    assert [each["code"] for each in run["reasons"]] == [code, "never_asked"]
    assert run["matches"] is False
    assert words in run["reasons"][0]["words"]
    assert words in ward.why(situation)


@pytest.mark.parametrize("situation", ASKED)
def test_the_outcome_of_a_device_is_reported(ward: Ward, situation: str) -> None:
    code, words = ASKED[situation]
    result = json.loads(ward.why(situation, "--json", "--run", ward.run))
    (run,) = result["runs"]
    keeps_out = ["missed_task"] if situation in ("declined", "given up") else []
    assert (result["state"], run["matches"]) == ("active", not keeps_out)
    assert [each["code"] for each in result["reasons"]] == keeps_out
    *_, last = run["reasons"]
    assert [each["code"] for each in run["reasons"]] == [*keeps_out, code]
    assert words in last["words"]
    assert words in ward.why(situation)


def test_rejection_names_what_was_wrong(ward: Ward) -> None:
    assert "fc." in ward.why("rejected")


def test_a_device_that_is_none_is_refused(ward: Ward) -> None:
    assert_refused(ward.fedloop("device", "why", "nobody"), "no device matches 'nobody'")
