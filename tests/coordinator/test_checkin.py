"""Check-ins, downloads, evaluations and why: what the device API answers, and what the operator is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import update

from coordinator.db import events, participants
from coordinator.db.store import Database
from coordinator.db.tables import rounds
from coordinator.fleets.device import DeviceFleet
from coordinator.rounds import intake, plan
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import (
    Answer,
    Model,
    Silence,
    Stopped,
    Terms,
)
from coordinator.rounds.plan import LocalWork, RunPlan, Task
from coordinator.scheduling.deployments import Selection
from edge_client.train.class_scores import class_scores
from edge_client.wire.device import EvaluationResult, TaskOffer, to_json
from strategies import presets
from tests.coordinator.test_uploads import PARAMS, result_of
from tests.support.databases import database, database_url
from tests.support.device_world import NO_TLS, REPORT, START, Refused, TestDevice, World, serving, sqlite
from tests.support.listening import Listening

__all__ = ["database", "database_url"]

FIGURES = {
    "rows": 10,
    "labels": 10,
    "correct": 7,
    "loss_sum": 3.5,
    "site": "north",
    "quantity": None,
    "scores": None,
}
BAD_SUMS = ((-0.1, 0.0, 1.0), (6.0, 0.0, 1.0), (3.0, 5.0, 2.0), (3.0, 1e308, 1.0))
"""Sums of 10 labels that no labels and errors have: a negative one, and three beyond the inequality of Cauchy and Schwarz."""


def sums_of(sums: tuple[float, float, float]) -> dict[str, Any]:
    return {"quantity": dict(zip(("absolute_sum", "label_sum", "label_square_sum"), sums, strict=True))}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with sqlite(tmp_path) as database, serving(tmp_path, database, lease_seconds=120.0) as served:
        yield served


def submit(
    fleet: DeviceFleet,
    cohort: tuple[str, ...],
    number: int = 1,
    wanted: int = 9,
    population: int = 3,
    weight_limit: int | None = None,
) -> tuple[Model, tuple[Task, ...]]:
    model = fleet.model(PARAMS, {})
    work = LocalWork(batch_size=4, lr=0.1, epochs=None, steps=1)
    run_plan = RunPlan(7, 3, presets.get("fedavg"), work, ("w",), Closing(9))
    tasks = plan.make_tasks(cohort, number, model.base, run_plan)
    expected = intake.make_expected({"w": PARAMS["w"]}, {}, weight_limit=weight_limit)
    fleet.submit(tasks, model, Terms(expected, Closing(wanted, 3600), population))
    return model, tasks


def fleet_of(world: World, run: str = "r", **changed: Any) -> DeviceFleet:
    return DeviceFleet(world.services, world.start_run(run, **changed), patience_seconds=0)


def reported(world: World, device: str, run: str = "r") -> list[tuple[str, str]]:
    answer = httpx.get(f"{world.url}/api/v1/devices/{device}/why", params={"run": run}, verify=NO_TLS).json()
    return [(reason["code"], reason["words"]) for reason in answer["runs"][0]["reasons"]]


def due_seconds(world: World) -> float:
    """Seconds until the device `a` is expected."""
    row = world.services.database.read(lambda at: participants.candidate(at, "a"))
    assert row is not None and row.expected_at is not None
    return (row.expected_at - world.clock()).total_seconds()


def codes(world: World, device: str, run: str = "r") -> list[str]:
    return [code for code, _ in reported(world, device, run)]


def test_a_device_of_no_run_gets_the_time_of_its_next_check_in(world: World) -> None:
    answer = world.enrol("a").check_in(wait_seconds=30)
    assert not answer.hold and answer.task is None
    assert 3 < answer.next_seconds < 7


def test_a_device_of_a_runs_pool_is_held_until_its_task_is_there(world: World) -> None:
    device, fleet = world.enrol("a"), fleet_of(world)
    got: list[TaskOffer | None] = []
    poll = threading.Thread(target=lambda: got.append(device.check_in(wait_seconds=50).task))
    poll.start()
    while not world.services.signals.count_waiting("device:"):
        threading.Event().wait(0.01)
    submit(fleet, ("a",))
    poll.join()
    assert got[0] is not None and got[0].deadline_seconds == 3600 and got[0].runtime == "litert"


def test_a_device_is_expected_at_its_scheduled_check_in(world: World) -> None:
    device = world.enrol("a")
    reported = device.check_in(wait_seconds=50).next_seconds
    assert due_seconds(world) == pytest.approx(reported)
    fleet = fleet_of(world)
    submit(fleet, ("a",))
    offer = device.lease()  # of 120 s, renewed every third of it
    assert due_seconds(world) == 45
    device.check_in(working_on=offer.task)
    assert due_seconds(world) == 45


def test_a_device_whose_long_poll_breaks_off_is_late_five_seconds_after(world: World) -> None:
    device = world.enrol("a")
    fleet_of(world)
    with pytest.raises(httpx.ReadTimeout):
        device.check_in(read_seconds=0.3, wait_seconds=50)
    while due_seconds(world) != 5:
        threading.Event().wait(0.01)


def test_without_room_for_long_polls_the_answer_has_a_time(tmp_path: Path) -> None:
    with sqlite(tmp_path) as database, serving(tmp_path, database, held=0) as world:
        world.start_run("r")
        answer = world.enrol("a").check_in(wait_seconds=50)
        assert not answer.hold and answer.next_seconds > 3


def test_a_restarted_device_gets_its_task_again(world: World) -> None:
    device, fleet = world.enrol("a"), fleet_of(world)
    submit(fleet, ("a",))
    assert device.lease() == device.lease()


def test_a_task_that_is_not_wanted_any_more_is_stopped(world: World) -> None:
    device, fleet = world.enrol("a"), fleet_of(world)
    _, tasks = submit(fleet, ("a",))
    offer = device.lease()
    assert not device.check_in(working_on=offer.task).stop
    fleet.cancel(tasks)
    assert device.check_in(working_on=offer.task).stop
    assert device.check_in(working_on="something else").stop


def test_a_lease_runs_out_in_silence_and_the_device_gets_nothing_more_of_the_round(world: World) -> None:
    quiet, alive, fleet = world.enrol("a"), world.enrol("b"), fleet_of(world)
    submit(fleet, ("a", "b"))
    task, other = quiet.lease(), alive.lease()
    for _ in range(3):
        world.clock.pass_seconds(60)
        alive.check_in(working_on=other.task)
    listening = Listening(fleet)
    while "lease_expired" not in codes(world, "a"):
        threading.Event().wait(0.01)
    assert quiet.check_in().task is None
    with pytest.raises(Refused, match="lease_expired"):
        quiet.start_upload(task.task, b"late")
    assert alive.upload(other.task, result_of(other)).accepted
    reported = [(type(each), each.task.message.client) for each in listening.until_reported()]
    assert reported == [(Silence, "a"), (Answer, "b")]


def test_leases_do_not_run_out_while_the_coordinator_is_away(world: World) -> None:
    device = world.enrol("a")
    fleet = fleet_of(world)
    _, tasks = submit(fleet, ("a",))
    offer = device.lease()
    world.clock.pass_seconds(1000)
    again = DeviceFleet(world.services, world.services.deployments.active()[0], patience_seconds=0)
    reopened = again.find_open_round(1)
    assert reopened is not None and reopened.tasks == tuple(tasks) and reopened.population == 3
    submit(again, ("a",))
    assert device.upload(offer.task, result_of(offer)).accepted
    assert [type(each) for each in again.results()] == [Answer]


def test_the_weight_limit_follows_what_devices_declared_and_outlives_a_restart(
    tmp_path: Path, database: Database
) -> None:
    with serving(tmp_path, database, lease_seconds=120.0) as world:
        for name, rows in {"a": 30, "b": 2**62, "c": 50, "d": 0}.items():
            world.enrol(name).check_in(datasets={"digits": rows, "other": 10**6})
        world.enrol("silent")
        fleet = fleet_of(world)
        declared = fleet.declared_examples(["a", "b", "c", "d", "silent"])
        assert declared == {"a": 30, "b": 2**62, "c": 50}
        submit(fleet, ("a", "b", "c"), weight_limit=plan.weight_limit(declared.values(), 10.0))

        again = DeviceFleet(world.services, world.services.deployments.active()[0], patience_seconds=0)
        reopened = again.find_open_round(1)
        assert reopened is not None and reopened.weight_limit == 500
        earlier = {"shapes": {"delta/w": [60_000]}, "payload_limit_bytes": 10**6}
        database.write(lambda at: at.execute(update(rounds).values(expected=earlier))).result()
        opened_by_an_earlier_version = again.find_open_round(1)
        assert opened_by_an_earlier_version is not None and opened_by_an_earlier_version.weight_limit is None


def test_a_run_that_is_stopped_leaves_its_round_open(world: World) -> None:
    world.enrol("a")
    fleet = fleet_of(world)
    submit(fleet, ("a",))
    fleet.stop()
    with pytest.raises(Stopped):
        next(fleet.results())
    assert fleet_of(world, "other").find_open_round(1) is None


def test_clients_are_those_that_match_in_order_of_their_ids(world: World) -> None:
    fleet = fleet_of(world)
    for name in ("c", "a", "b", "d"):
        world.enrol(name).check_in(ineligible=("on battery",) if name == "b" else ())
    world.set_device("d", state="revoked")
    assert fleet.clients(9) == ["a", "c"]
    world.clock.pass_seconds(1000)  # "a" is overdue
    TestDevice(world.url, "c").check_in()
    assert fleet.clients(9) == ["c"]


def test_clients_waits_until_there_are_enough(world: World) -> None:
    fleet = DeviceFleet(world.services, world.start_run("r"), patience_seconds=60)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(fleet.clients(2)))
    waiting.start()
    world.enrol("a").check_in()
    world.enrol("b").check_in()
    waiting.join()
    assert found == [["a", "b"]]


def waits(world: World) -> list[dict[str, Any]]:
    """What was told of rounds that wait for devices."""
    reported = world.services.database.read(lambda at: events.since(at, 0, 1000))
    return [row._mapping["values"] for row in reported if row.event == "round_waiting"]


def test_a_fleet_that_is_too_small_is_reported_and_waited_for_once(
    tmp_path: Path, database: Database
) -> None:
    with serving(tmp_path, database) as world:
        fleet = DeviceFleet(world.services, world.start_run("r"), patience_seconds=0.05)
        fleet.find_open_round(3)
        world.enrol("a").check_in()
        world.enrol("b").check_in(ineligible=("on battery",))
        assert fleet.clients(9) == ["a"]
        blocked = [{"device": "b", "name": "the b", "reasons": ["ineligible: on battery"]}]
        expected = {"round": 3, "eligible": 1, "wanted": 9, "least": 1, "enrolled": 2, "seconds": 0}
        assert waits(world) == [{**expected, "blocked": blocked, "unnamed": 0}]
        assert fleet.clients(9) == ["a"]
        assert len(waits(world)) == 1, "the second round waited again"
        TestDevice(world.url, "b").check_in()
        assert fleet.clients(9) == ["a", "b"]
        world.set_device("b", state="revoked")
        assert fleet.clients(9) == ["a"]
        world.set_device("a", state="revoked")
        world.enrol("c").check_in()
        world.enrol("d").check_in()
        assert fleet.clients(9) == ["c", "d"]
        assert len(waits(world)) == 1


def test_a_run_without_devices_says_so_and_begins_with_the_first(world: World) -> None:
    fleet = DeviceFleet(world.services, world.start_run("r", quorum=1), patience_seconds=0)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(fleet.clients(2)), daemon=True)
    waiting.start()
    while not waits(world):
        threading.Event().wait(0.01)
    world.enrol("a").check_in()
    waiting.join()
    assert found == [["a"]]
    assert (waits(world)[0]["eligible"], waits(world)[0]["enrolled"]) == (0, 0)


def test_a_device_killed_in_a_round_that_closed_without_it_is_chosen_once_it_checks_in(
    tmp_path: Path, database: Database
) -> None:
    with serving(tmp_path, database, lease_seconds=7200.0) as world:
        killed, alive, fleet = world.enrol("a"), world.enrol("b"), fleet_of(world)
        killed.check_in()
        alive.check_in()
        _, tasks = submit(fleet, ("a", "b"))
        killed.lease(wait_seconds=50.0)
        world.clock.pass_seconds(1)
        fleet.cancel(tasks)
        assert fleet.clients(9) == ["b"]
        assert codes(world, "a")[0] == "missed_task"
        killed.check_in()
        assert fleet.clients(9) == ["a", "b"]


def test_a_device_that_left_a_task_unanswered_is_chosen_once_it_checks_in(
    tmp_path: Path, database: Database
) -> None:
    with serving(tmp_path, database, lease_seconds=7200.0) as world:
        killed, alive, fleet = world.enrol("a"), world.enrol("b"), fleet_of(world)
        killed.check_in()
        alive.check_in()
        submit(fleet, ("a", "b"))
        killed.lease(wait_seconds=50.0)
        offer = alive.lease()
        world.clock.pass_seconds(3599)
        alive.check_in(working_on=offer.task)
        assert alive.upload(offer.task, result_of(offer)).accepted
        world.set_device("a", expected_at=world.clock() + timedelta(seconds=3))  # not overdue
        world.clock.pass_seconds(2)
        assert [type(each) for each in fleet.results()] == [Answer, Silence]
        assert fleet.clients(9) == ["b"]
        assert codes(world, "a") == ["missed_task", "too_late"]
        killed.check_in()
        assert fleet.clients(9) == ["a", "b"]
        assert codes(world, "a") == ["too_late"]


def test_versions_of_the_wire_are_agreed_on_or_refused(world: World) -> None:
    device = world.enrol("a")
    assert device.check_in(wire="1.2").wire == "1.2"
    assert device.check_in(wire="1.9").wire == "1.4"
    for unspoken in ("1.1", "2.0"):
        with pytest.raises(Refused) as refused:
            device.check_in(wire=unspoken)
        assert (refused.value.status, refused.value.code) == (426, "wire_version")
    with pytest.raises(Refused, match="malformed"):
        device.check_in(wire="new")


def test_blobs_are_given_by_ranges_to_whom_an_open_task_refers_to_them(world: World) -> None:
    device, other, fleet = world.enrol("a"), world.enrol("b"), fleet_of(world)
    model, tasks = submit(fleet, ("a",))
    offer = device.lease()
    assert offer.params.sha256 == model.base
    full = device.fetch(model.base)
    assert len(full.content) == offer.params.size_bytes
    part = device.fetch(model.base, Range="bytes=100-199")
    assert part.status_code == 206 and part.content == full.content[100:200]
    assert part.headers["etag"] == f'"{model.base}"'
    with pytest.raises(Refused, match="not_yours"):
        other.fetch(model.base)
    for unknown in ("0" * 63 + "1", "..%2f..%2ffedloop.db"):
        with pytest.raises(Refused, match="not_found"):
            device.fetch(unknown)
    fleet.cancel(tasks)
    with pytest.raises(Refused, match="not_yours"):
        device.fetch(model.base)


def test_devices_evaluate_on_rows_of_their_own(world: World) -> None:
    devices = {name: world.enrol(name) for name in ("a", "b")}
    fleet = fleet_of(world)
    for name, device in devices.items():
        device.check_in(wire="1.2" if name == "a" else "1.3")
    model = fleet.model(PARAMS, {})
    got: list[dict[str, EvaluationResult]] = []
    evaluating = threading.Thread(target=lambda: got.append(fleet.evaluate(3, model, 60)))
    evaluating.start()
    offer = held_task(devices["a"])
    assert (offer.kind, offer.round, offer.params.sha256) == ("evaluate", 3, model.base)
    logits, y = 4 * np.eye(10, dtype=np.float32), np.array([*range(7), 1, 1, 1], np.int32)
    counted = class_scores(logits, y)
    assert counted is not None
    scores = json.loads(json.dumps(to_json(counted)))
    lies = ({"scores": scores | {"confusion": [[5, 5], [0, 0]]}}, {"scores": scores | {"positives": []}})
    sums = sums_of((3.0, 1.0, 2.0))  # their bounds divide by the labels and take the root of the losses
    beyond = ({"labels": 0, "correct": 0} | sums, {"loss_sum": -1.0} | sums)
    for bad in ({"correct": 11}, {"rows": 0}, {"loss_sum": -1.0}, *map(sums_of, BAD_SUMS), *lies, *beyond):
        with pytest.raises(Refused, match="malformed"):
            devices["a"].evaluated(offer.task, FIGURES | {"base": model.base} | bad)
    with pytest.raises(Refused, match="stale_base"):
        devices["a"].evaluated(offer.task, FIGURES | {"base": "00"})
    figures = FIGURES | {"base": model.base, "scores": scores}
    for _ in range(2):
        devices["a"].evaluated(offer.task, figures)
    devices["b"].decline(held_task(devices["b"]).task, "no_data", "no held-out rows")
    evaluating.join()
    assert {name: json.loads(json.dumps(to_json(each))) for name, each in got[0].items()} == {"a": figures}


def held_task(device: TestDevice) -> TaskOffer:
    while True:
        offer = device.check_in(wait_seconds=5).task
        if offer is not None:
            return offer


@pytest.mark.parametrize("where", ["memory_bytes", "datasets"])
def test_a_number_beyond_any_machine_fails_no_run(tmp_path: Path, database: Database, where: str) -> None:
    """It is refused; one that an earlier version took is passed over, and the next check-in replaces it."""
    beyond: dict[str, Any] = {"memory_bytes": -(10**400), "datasets": {"digits": 10**400}}
    with serving(tmp_path, database, lease_seconds=120.0) as world:
        good, bad = world.enrol("a"), world.enrol("b")
        good.check_in()
        with pytest.raises(Refused, match="malformed"):
            bad.check_in(**{where: beyond[where]})
        world.set_device("b", report=to_json(replace(REPORT, **{where: beyond[where]})), last_seen_at=START)
        fleet = fleet_of(world, selection=Selection(memory_bytes=1))
        assert fleet.clients(1) == ["a"]
        assert codes(world, "b") == ["never_seen"]
        bad.check_in()
        assert fleet.clients(2) == ["a", "b"]


def test_a_run_that_its_owner_opted_out_of_is_declined_for_the_device(world: World) -> None:
    device, fleet = world.enrol("a"), fleet_of(world)
    submit(fleet, ("a",))
    assert device.check_in(opted_out=("r",)).task is None
    assert [each.reason for each in fleet.results() if isinstance(each, Silence)] == [
        "its owner opted out of this run"
    ]


def test_each_device_of_a_run_is_reported_with_its_reasons(world: World) -> None:
    fleet_of(world)
    world.enrol("a").check_in()
    world.enrol("b", state="pending")
    world.enrol("c").check_in(datasets={})
    world.enrol("d", state="left")
    url = f"{world.url}/api/v1/runs/r/devices"
    page = httpx.get(url, params={"limit": 2}, verify=NO_TLS).json()
    assert [(each["device"], each["matches"]) for each in page["devices"]] == [("a", True), ("b", False)]
    (last,) = httpx.get(url, params={"after": page["next"]}, verify=NO_TLS).json()["devices"]
    assert (last["name"], [each["code"] for each in last["reasons"]]) == ("the c", ["no_dataset"])
    assert httpx.get(f"{world.url}/api/v1/runs/nobody/devices", verify=NO_TLS).status_code == 404


def test_why_tells_what_keeps_a_device_out(world: World) -> None:
    device = world.enrol("a")
    fleet_of(world)
    assert codes(world, "a") == ["never_seen"]
    device.check_in()
    assert codes(world, "a") == ["waiting"]
    device.check_in(ineligible=("on battery",))
    assert ("ineligible", "ineligible: on battery") in reported(world, "a")
    device.check_in(runtimes={"torch": "2.6"})
    assert codes(world, "a") == ["wrong_runtime"]
    device.check_in(datasets={})
    assert codes(world, "a") == ["no_dataset"]
    device.check_in()
    world.set_device("a", certificate_until=world.clock() - timedelta(days=1))
    assert codes(world, "a") == ["certificate_expired"]
    world.set_device("a", state="revoked")
    assert codes(world, "a") == ["revoked"]
    assert httpx.get(f"{world.url}/api/v1/devices/nobody/why", verify=NO_TLS).status_code == 404


def test_why_tells_what_became_of_a_device_in_a_round(world: World) -> None:
    names = ("accepted", "rejected", "declined", "silent", "training", "idle")
    devices = {name: world.enrol(name) for name in names}
    fleet = fleet_of(world)
    for device in devices.values():
        device.check_in()
    submit(fleet, names[:-1], population=len(names))
    assert codes(world, "silent") == ["asked"]
    offers = {name: devices[name].lease() for name in names[:-1]}
    assert codes(world, "training") == ["training"]
    assert devices["accepted"].upload(offers["accepted"].task, result_of(offers["accepted"])).accepted
    with pytest.raises(Refused):
        devices["rejected"].upload(offers["rejected"].task, b"nonsense, and too short")
    world.clock.pass_seconds(1)
    devices["declined"].decline(offers["declined"].task, "limits", "out of memory")
    assert codes(world, "declined") == ["missed_task", "declined"]
    world.clock.pass_seconds(118)
    for name in names:
        if name != "silent":
            devices[name].check_in(working_on=offers[name].task if name == "training" else None)
    world.clock.pass_seconds(2)
    Listening(fleet)
    while "lease_expired" not in codes(world, "silent"):
        threading.Event().wait(0.01)
    assert reported(world, "idle") == [
        ("not_chosen", "not selected in round 1: the cohort had 5 of 6 devices")
    ]
    assert codes(world, "accepted") == ["accepted"]
    ((code, words),) = reported(world, "rejected")
    assert code == "rejected" and "header" in words
    assert reported(world, "declined") == [("declined", "it declined round 1: out of memory")]
    assert codes(world, "training") == ["training"]
