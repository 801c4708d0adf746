"""Pacing and limits: how often devices come, how many are held, and how much one of them may ask."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import event

from coordinator.context.services import DeviceLog
from coordinator.errors import Refusal
from coordinator.limits import rates
from coordinator.limits.rates import DeviceRequests
from coordinator.scheduling import pacing
from coordinator.scheduling.pacing import Pacing
from tests.support.device_world import World, serving, sqlite

FLEET = 10_000
RATE = 100.0


class Timetable:
    """A fleet that comes when it is told to, in virtual time."""

    def __init__(self, fleet: int = FLEET) -> None:
        self.now = 1_000_000.0
        self.fleet = fleet
        self.pacing = self.restarted()

    def restarted(self) -> Pacing:
        return Pacing(random.Random(1), monotonic=lambda: self.now)

    def next_checkin(self) -> float:
        return self.pacing.next_seconds(lambda: self.fleet, RATE)

    def run(self, due: list[float], seconds: float) -> Counter[int]:
        """Check-ins of each second from now on; `due`: when each device comes first, from now."""
        start = self.now
        heap = [start + each for each in due]
        heapq.heapify(heap)
        seen: Counter[int] = Counter()
        while heap[0] < start + seconds:
            self.now = heap[0]
            seen[int(self.now - start)] += 1
            heapq.heapreplace(heap, self.now + self.next_checkin())
        return seen


def test_a_fleet_that_came_all_at_once_comes_back_one_by_one() -> None:
    seen = Timetable().run([0.0] * FLEET, 1000)
    assert seen.pop(0) == FLEET
    assert max(seen.values()) <= RATE + 1
    assert sum(seen.values()) >= 0.85 * RATE * 1000  # and nobody waits for longer than that takes


def test_a_restarted_coordinator_keeps_the_rate_of_the_fleet_it_finds() -> None:
    timetable = Timetable()
    timetable.pacing = timetable.restarted()
    seen = timetable.run([index / RATE for index in range(FLEET)], 1000)
    assert max(seen.values()) <= RATE + 1


def test_a_device_that_comes_all_the_time_does_not_keep_the_others_away() -> None:
    timetable = Timetable(fleet=1000)
    received = [timetable.next_checkin() for _ in range(100_000)]
    assert max(received) <= 3 * 1000 / RATE


def test_nobody_comes_within_seconds_or_later_than_in_an_hour() -> None:
    assert Timetable(fleet=3).next_checkin() >= pacing.MIN_SECONDS
    assert Timetable(fleet=10**8).next_checkin() == pacing.MAX_SECONDS


def test_there_is_room_for_so_many_long_polls_and_two_of_a_device() -> None:
    polls = Pacing()
    with (
        polls.poll_slot(3, "a") as first,
        polls.poll_slot(3, "a") as second,
        polls.poll_slot(3, "a") as third,
    ):
        assert (first, second, third) == (True, True, False)
        with polls.poll_slot(3, "b") as other, polls.poll_slot(3, "c") as too_many:
            assert (other, too_many) == (True, False)
    with polls.poll_slot(1, "c") as freed:
        assert freed


def test_a_device_has_so_many_requests_at_a_time() -> None:
    of_process = DeviceRequests()
    held = [of_process.request("a") for _ in range(rates.CONCURRENT_REQUESTS)]
    for each in held:
        each.__enter__()
    with pytest.raises(Refusal, match="in progress"), of_process.request("a"):
        pass
    with of_process.request("b"):
        pass
    held[0].__exit__(None, None, None)
    with of_process.request("a"):
        pass


def test_a_device_has_so_many_requests_a_second_in_the_long_run() -> None:
    now = 0.0
    of_process = DeviceRequests(lambda: now)
    answered = 0
    for _ in range(10_000):
        now += 0.001
        try:
            with of_process.request("a"):
                answered += 1
        except Refusal as refusal:
            assert (refusal.status, refusal.code) == (429, "too_many_requests")
    assert answered == pytest.approx(rates.BURST_REQUESTS + 10 * rates.REQUESTS_PER_SECOND, abs=2)


def test_a_device_is_logged_when_it_stands_otherwise_and_not_at_every_poll() -> None:
    log = DeviceLog()
    with structlog.testing.capture_logs() as lines:
        for state in ("idle", "idle", "held", "held"):
            log.log("a", state, task=None)
        for reasons in (["on battery"], ["on battery"], ["on battery", "quiet hours"]):
            log.log("a", "ineligible", ineligible=reasons)
    assert [(line["device"], line["state"], line.get("ineligible")) for line in lines] == [
        ("a", "idle", None),
        ("a", "held", None),
        ("a", "ineligible", ["on battery"]),
        ("a", "ineligible", ["on battery", "quiet hours"]),
    ]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with sqlite(tmp_path) as database, serving(tmp_path, database) as served:
        yield served


def test_a_check_in_costs_as_much_in_a_large_fleet_as_in_a_small_one(world: World) -> None:
    world.start_run("r")
    device = world.enrol("first")
    device.check_in()  # the fleet is counted now and then, not here

    def statements_of_a_check_in() -> list[str]:
        made: list[str] = []

        def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            made.append(statement)

        event.listen(world.services.database.engine, "before_cursor_execute", note)
        device.check_in()
        event.remove(world.services.database.engine, "before_cursor_execute", note)
        return [each for each in made if not each.startswith(("SAVEPOINT", "RELEASE", "BEGIN"))]

    small = statements_of_a_check_in()
    for index in range(20):
        world.enrol(f"other {index}").check_in()
    assert statements_of_a_check_in() == small
    of_one = ("devices.id = ?", "tasks.device = ?", "rollout_members.device = ?")
    assert all(any(column in each for column in of_one) for each in small)
