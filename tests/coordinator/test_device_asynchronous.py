"""Asynchronous rounds on devices: the simulation's bits, older versions that stay available, and restarts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.db import runs
from coordinator.db.store import Database
from coordinator.db.tables import tasks
from coordinator.fleets.replayed import ReplayedAsynchronousFleet
from coordinator.fleets.trace_file import format_trace, read_trace
from coordinator.rounds.plan import Asynchrony, RunPlan
from coordinator.rounds.records import RunState
from strategies import staleness
from tests.coordinator.test_asynchronous import CLIENTS, SECONDS, START, simulate
from tests.coordinator.test_replay import simulated_clients
from tests.support.buffered_devices import BufferedRun
from tests.support.databases import database, database_url
from tests.support.device_world import Refused, World, serving
from tests.support.federation import run_plan
from tests.support.long import extended
from tests.support.quadratic_pool import QuadraticPool, Times, fleet_of
from tests.support.runs import bits
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

__all__ = ["database", "database_url"]

FOUR = {name: CLIENTS[name] for name in "abcd"}


def plan_of(
    buffer: int,
    concurrency: int,
    rounds: int,
    oldest: int | None = None,
    strategy: str = "fedbuff",
    **changed: Any,
) -> RunPlan:
    asynchrony = Asynchrony(concurrency, staleness.parse("polynomial(0.5)"), oldest)
    return run_plan(strategy, clients_per_round=buffer, asynchrony=asynchrony, rounds=rounds, **changed)


def simulated(plan: RunPlan) -> tuple[RunState, list[str], list[int | None]]:
    """The simulation's last state, the order in which its updates were accepted, and the staleness of its rounds."""
    last, seen = simulate(plan, fleet_of(FOUR, Times(SECONDS))[0])
    order = [event["client"] for event in seen.of("update_accepted")]
    return last, order, [record.staleness_max for record in seen.records]


@pytest.fixture
def world(tmp_path: Path, database: Database) -> Iterator[World]:
    with serving(tmp_path, database, lease_seconds=1e6) as world:
        yield world


@pytest.mark.parametrize(("strategy", "buffer"), [("fedbuff", 2), ("fedasync", 1), ("fedasync", 2)])
def test_devices_give_the_bits_of_a_simulation_with_the_same_answers(
    world: World, strategy: str, buffer: int
) -> None:
    plan = plan_of(buffer, 4, rounds=6, strategy=strategy)
    expected, order, ages = simulated(plan)
    assert max(age or 0 for age in ages) >= 2
    run = BufferedRun(world, plan, FOUR, START)
    run.play(order)
    assert bits(run.finish()) == bits(expected)
    assert [record["staleness_max"] for record in run.records()] == ages
    assert [record["accepted"] for record in run.records()] == [buffer] * 6


def test_the_trace_of_devices_replays_in_a_simulation(world: World, tmp_path: Path) -> None:
    """They answer in an order of their own; the simulation, which would answer in another one, follows the trace."""
    plan = replace(plan_of(2, 4, rounds=4), records=True)
    run = BufferedRun(world, plan, FOUR, START)
    run.play("dcbabdca")
    last = run.finish()
    path = tmp_path / "trace.csv"
    path.write_text(format_trace(run.seen.events))
    trace = read_trace(path, list(FOUR), plan)
    taken = [{line.client for line in each.lines} for each in trace.values()]
    assert taken == [set("dc"), set("ba"), set("bd"), set("ca")]
    fleet = ReplayedAsynchronousFleet(QuadraticPool(FOUR), simulated_clients(FOUR), trace, path)
    assert bits(simulate(plan, fleet)[0]) == bits(last)


def test_fewer_places_than_devices_go_to_the_clients_that_the_simulation_draws(world: World) -> None:
    plan = plan_of(2, 2, rounds=4)
    expected, order, _ = simulated(plan)
    run = BufferedRun(world, plan, FOUR, START)
    run.play(order)
    assert bits(run.finish()) == bits(expected)


@pytest.mark.parametrize("kept", [1, 2, *extended(3, 4, 5)])
def test_a_run_that_another_process_continues_ends_in_the_same_model(world: World, kept: int) -> None:
    """Its devices deliver while nobody runs the rounds, too."""
    plan = plan_of(2, 4, rounds=3)
    expected, order, _ = simulated(plan)
    run = BufferedRun(world, plan, FOUR, START)
    run.play(order[:kept])
    run.settle()
    run.stop()
    started = {row.device for row in live(world)}
    if order[kept] in started:
        run.deliver(order[kept])
        kept += 1
    run.continue_()
    run.play(order[kept:])
    assert bits(run.finish()) == bits(expected)


def test_the_model_that_a_waiting_update_started_from_stays_until_its_turn(world: World) -> None:
    """FedAsync mixes in what two devices made of the first version while nobody ran the rounds, one after the other."""
    plan, three = plan_of(1, 3, rounds=3, strategy="fedasync"), {name: CLIENTS[name] for name in "abc"}
    expected, _ = simulate(plan, fleet_of(three, Times({"a": 1.0, "b": 1.1, "c": 1.2}))[0])
    run = BufferedRun(world, plan, three, START)
    run.settle()
    first = world.services.blobs.path(run.offer("c").params.sha256)
    run.play("a")
    run.settle()
    run.stop()
    run.deliver("b")
    run.deliver("c")
    assert first.exists()
    run.continue_()
    assert bits(run.finish()) == bits(expected)
    assert [record["staleness_max"] for record in run.records()] == [0, 1, 2]
    assert not first.exists()


def live(world: World) -> list[Any]:
    query = select(tasks).where(tasks.c.state.in_(("waiting", "leased")))
    return list(world.services.database.read(lambda at: at.execute(query).all()))


def test_the_model_of_a_device_at_work_stays_until_it_has_answered(world: World) -> None:
    run = BufferedRun(world, plan_of(2, 3, rounds=4), {name: CLIENTS[name] for name in "abc"}, START)
    run.settle()
    slow = run.offer("c")
    first = world.services.blobs.path(slow.params.sha256)
    for number in (1, 2, 3):
        run.play("ab")
        wait_until(lambda: len(run.records()) >= number)  # noqa: B023 - called at once
        assert first.exists()
        run.check_in("c")
    assert run.devices["c"].upload(slow.task, run.trained(slow)).accepted
    run.settle()
    run.deliver("a")
    run.finish()
    assert [record["staleness_max"] for record in run.records()] == [0, 0, 0, 3]
    assert not first.exists()
    kept = world.services.database.read(lambda at: runs.find(at, "r"))
    assert kept is not None
    bases = {row.offer["params"]["sha256"] for row in live(world)}
    found = {path.name for path in (world.services.settings.home / "blobs").iterdir() if path.is_file()}
    assert found == {kept.params, kept.strategy_state, *bases}


def test_a_device_whose_model_is_too_old_must_stop_and_gets_the_newest(world: World) -> None:
    run = BufferedRun(
        world, plan_of(2, 3, rounds=3, oldest=1), {name: CLIENTS[name] for name in "abc"}, START
    )
    run.settle()
    slow = run.offer("c")
    payload = run.trained(slow)
    run.play("abab")
    run.settle()
    assert run.devices["c"].check_in(working_on=slow.task).stop
    with pytest.raises(Refused) as refused:
        run.devices["c"].upload(slow.task, payload)
    assert refused.value.code == "rejected" and "2 versions old" in refused.value.error["message"]
    assert run.offer("c").round == 3
    run.play("ac")
    run.finish()
    assert run.records()[-1]["rejections"] == {"stale_base": 1}


def test_a_round_without_further_devices_takes_what_there_is(world: World) -> None:
    run = BufferedRun(
        world, plan_of(3, 3, rounds=1), {name: CLIENTS[name] for name in "ab"}, START, patience_seconds=0.0
    )
    run.play("a")
    offer = run.offer("b")
    run.devices["b"].decline(offer.task, "limits", "too little memory")
    run.finish()
    (record,) = run.records()
    assert (record["accepted"], record["silent"]) == (1, 1)


def test_an_update_that_the_disk_has_damaged_is_trained_once_more(world: World) -> None:
    plan = plan_of(2, 2, rounds=1)
    pair = {name: CLIENTS[name] for name in "ab"}
    undisturbed, _ = simulate(plan, fleet_of(pair, Times(SECONDS))[0])
    run = BufferedRun(world, plan, pair, START)
    run.settle()
    offer = run.offer("a")
    payload = run.trained(offer)
    assert run.devices["a"].upload(offer.task, payload).accepted
    (blob,) = [
        path for path in (world.services.settings.home / "blobs").iterdir() if path.read_bytes() == payload
    ]
    blob.write_bytes(payload[:-1] + bytes([payload[-1] ^ 0x40]))
    run.deliver("b")
    again = run.offer("a")
    assert again.task == offer.task
    run.deliver("a")
    assert bits(run.finish()) == bits(undisturbed)
