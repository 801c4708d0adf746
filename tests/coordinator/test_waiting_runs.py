"""Waiting runs: when and how completely they tell why each device cannot take part. The clock moves as the fleet waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from coordinator.context.signals import Signals
from coordinator.db import events
from coordinator.fleets.device import DeviceFleet
from coordinator.rounds.fleet import Stopped
from coordinator.scheduling.matching import OVERDUE_AFTER
from edge_client.wire.device import to_json
from tests.support.device_world import REPORT, START, Clock, World, serving, sqlite

BOUND_SECONDS = 5.0
LOOK_SECONDS = 0.2
"""What each look at the devices takes, on the clock of these tests."""


@dataclass(frozen=True)
class Change:
    """Something that happens at a moment. `wakes`: the coordinator is signalled, as by a check-in."""

    at: float
    act: Callable[[], None]
    wakes: bool


class SignalsInTime(Signals):
    """Signals for one thread, whose waits move the clock. What is to happen meanwhile happens at its moment."""

    def __init__(self, clock: Clock, changes: list[Change]) -> None:
        super().__init__()
        self._clock, self._changes = clock, changes

    def wait(self, topic: str, seen: int, timeout_seconds: float) -> bool:
        end = seconds_of(self._clock()) + timeout_seconds
        while not (woken := self.seen(topic) > seen) and self._changes and self._changes[0].at <= end:
            change = self._changes.pop(0)
            self._clock.now = max(self._clock.now, moment(change.at))
            change.act()
            if change.wakes:
                self.notify("devices")
        if not woken:
            self._clock.now = moment(end)
        return woken


def seconds_of(when: datetime) -> float:
    return (when - START).total_seconds()


def moment(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with sqlite(tmp_path) as database, serving(tmp_path, database) as served:
        yield served


def wait_through(world: World, changes: list[Change], end: float) -> list[tuple[float, dict[str, Any]]]:
    """The notices of a run that waits from the first second until `end`, and their moments."""
    fleet: DeviceFleet | None = None
    services = replace(
        world.services,
        signals=SignalsInTime(world.clock, [*changes, Change(end, lambda: stop(fleet), wakes=True)]),
    )

    def look() -> float:
        world.clock.pass_seconds(LOOK_SECONDS / 2)  # the fleet asks before and after it reads
        return seconds_of(world.clock())

    deployment = world.start_run("r", quorum=1)
    fleet = DeviceFleet(services, deployment, patience_seconds=0, seconds_now=look)
    with pytest.raises(Stopped):
        fleet.clients(1)
    told = world.services.database.read(lambda at: events.since(at, 0, 1000))
    return [(seconds_of(row.time), row._mapping["values"]) for row in told if row.event == "round_waiting"]


def stop(fleet: DeviceFleet | None) -> None:
    assert fleet is not None
    fleet.stop()


def report(world: World, device: str, reason: str, due_seconds: float = 86_400) -> None:
    """What a check-in of a device that cannot take part leaves."""
    seen = {"last_seen_at": world.clock(), "expected_at": world.clock() + timedelta(seconds=due_seconds)}
    world.set_device(device, report=to_json(replace(REPORT, ineligible=(reason,))), **seen)


def test_the_reason_of_each_device_is_told_within_five_seconds_of_its_change(world: World) -> None:
    rng = np.random.default_rng(3)
    devices = [world.enrol(name).id for name in ("a", "b", "c")]
    held: dict[str, list[tuple[float, str]]] = {
        name: [(0.0, "it enrolled but never checked in")] for name in devices
    }
    changes, now, due = [], 0.0, 10.0
    report(world, world.enrol("late").id, "on battery", due)
    for number in range(60):
        now += float(rng.choice([0.05, 0.5, 1.9, 3.0, 7.0]))
        device = str(rng.choice(devices))
        reason = f"reason {'abcdefghij'[number % 10] * (1 + number // 10)}"
        held[device].append((now, f"ineligible: {reason}."))
        changes.append(
            Change(now, lambda device=device, reason=reason: report(world, device, reason), number % 2 == 0)  # type: ignore[misc]
        )
    held["late"] = [(0.0, "ineligible: on battery."), (due + OVERDUE_AFTER.total_seconds(), "is overdue.")]
    end = now + 2 * BOUND_SECONDS
    assert end > due + OVERDUE_AFTER.total_seconds() + BOUND_SECONDS

    notices = wait_through(world, changes, end)

    longest = 0.0
    for device, reasons in held.items():
        for (since, reason), (until, _) in zip(reasons, [*reasons[1:], (end, "")], strict=True):
            if until - since >= BOUND_SECONDS:
                longest = max(longest, min(at for at, each in notices if names(each, device, reason)) - since)
    assert 2 < longest <= BOUND_SECONDS
    moments = [at for at, _ in notices]
    assert np.diff(moments).min() >= 1.9, "notices follow each other closely"


def names(notice: dict[str, Any], device: str, reason: str) -> bool:
    (told,) = (each["reasons"] for each in notice["blocked"] if each["device"] == device)
    return len(told) == 1 and reason in f"{told[0]}."


def test_a_number_that_changes_in_a_reason_is_not_told_again(world: World) -> None:
    world.enrol("a")
    loads = [
        Change(at, lambda at=at: report(world, "a", f"load {at:.2f} per core"), wakes=True)  # type: ignore[misc]
        for at in np.arange(3.0, 60.0, 3.0)
    ]
    notices = wait_through(world, [*loads, Change(61, lambda: report(world, "a", "on battery"), True)], 70.0)
    assert [each["blocked"][0]["reasons"][0].split(",")[0] for _, each in notices] == [
        "it enrolled but never checked in; is `fedloop-edge run` running?",
        "ineligible: load 3.00 per core",
        "ineligible: on battery",
    ]


def test_a_notice_names_twenty_devices_and_the_run_shows_the_reasons_of_all(world: World) -> None:
    devices = [f"device-{number:02}" for number in range(30)]
    for name in devices:
        world.enrol(name)
        report(world, name, f"reason of {name}")
    ((at, notice),) = wait_through(world, [], 20.0)
    assert at <= BOUND_SECONDS
    assert [each["device"] for each in notice["blocked"]] == devices[:20] and notice["unnamed"] == 10
    shown = httpx.get(f"{world.url}/api/v1/runs/r/devices", params={"limit": 1000}).json()["devices"]
    assert [(each["device"], each["matches"], each["reasons"][0]["words"]) for each in shown] == [
        (name, False, f"ineligible: reason of {name}") for name in devices
    ]
