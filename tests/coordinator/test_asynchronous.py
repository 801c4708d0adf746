"""Asynchronous rounds: FedBuff against a twin of its own, and what neither workers nor a resume may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleets.simulated_clients import Presence
from coordinator.rounds import asynchronous
from coordinator.rounds.plan import Asynchrony, RunPlan
from coordinator.rounds.records import Checkpoint, RunState
from coordinator.rounds.step import AsynchronousFleet
from coordinator.runs.simulation_store import CheckpointStore
from strategies import presets, staleness
from strategies.params import Params
from tests.support.federation import run_plan
from tests.support.memory_fleet import MemoryClient, MemoryFleet
from tests.support.quadratic_pool import QuadraticPool, Times, fleet_of
from tests.support.runs import Seen, bits, first_state, run

START: Params = {"w": np.array([3.0, -2.0], np.float32)}
CLIENTS = {
    name: MemoryClient(a=0.5 + 0.3 * index, c=index - 2.0, num_examples=4 + 3 * index)
    for index, name in enumerate("abcdef")
}
SECONDS = {"a": 1.0, "b": 1.37, "c": 2.11, "d": 3.53, "e": 6.07, "f": 9.41}


def buffered(
    buffer: int, concurrency: int, weight: str = "polynomial(0.5)", strategy: str = "fedbuff", **changed: Any
) -> RunPlan:
    """A plan for `START` that steps at every `buffer` updates."""
    oldest = changed.pop("max_staleness", None)
    asynchrony = Asynchrony(concurrency, staleness.parse(weight), oldest)
    return run_plan(strategy, clients_per_round=buffer, asynchrony=asynchrony, **changed)


def simulate(plan: RunPlan, fleet: AsynchronousFleet, start: RunState | None = None) -> tuple[RunState, Seen]:
    return run(plan, fleet, start or first_state(plan, START), run_rounds=asynchronous.run)


def twin(
    buffer: int, rounds: int, weight: Mapping[int, float], lr: float, momentum: float
) -> tuple[np.ndarray, list[float], list[list[int]]]:
    """FedBuff, Nguyen 2022, Algorithm 1, where every client starts again as soon as there is a model that it has not trained.

    Returns the model, the time of each step and the staleness of its updates. Local steps on a parabola have a closed form.
    """
    versions, velocity = [START["w"].astype(np.float64)], np.zeros(2)
    begun, due = dict.fromkeys(CLIENTS, 0), dict(SECONDS)
    now, times, ages = 0.0, list[float](), list[list[int]]()
    for version in range(rounds):
        mean, arrived = np.zeros(2), list[int]()
        while len(arrived) < buffer:
            for client in CLIENTS:
                if client not in due and begun[client] < version:
                    begun[client], due[client] = version, now + SECONDS[client]
            client = min(due, key=due.__getitem__)
            now, base = due.pop(client), begun[client]
            a, c = CLIENTS[client].a, CLIENTS[client].c
            steps = -(-CLIENTS[client].num_examples // 4)
            mean += weight[version - base] * (c - versions[base]) * (1 - (1 - 0.1 * a) ** steps) / buffer
            arrived.append(version - base)
        velocity = momentum * velocity + mean
        versions.append(versions[-1] + lr * velocity)
        ages.append(sorted(arrived))
        times.append(now)
    return versions[-1], times, ages


@pytest.mark.parametrize("text", ["polynomial(0.5)", "constant", "hinge(10, 1)"])
def test_fedbuff_is_algorithm_1_of_its_paper(text: str) -> None:
    strategy = presets.get("fedbuff", server_lr=0.7, momentum=0.4)
    plan = replace(buffered(2, len(CLIENTS), text, rounds=12), strategy=strategy)
    last, seen = simulate(plan, fleet_of(CLIENTS, Times(SECONDS))[0])
    weight = {age: staleness.parse(text).weight(age) for age in range(13)}
    model, times, ages = twin(2, 12, weight, lr=0.7, momentum=0.4)
    np.testing.assert_allclose(last.params["w"], model, rtol=2e-6)
    assert max(max(each) for each in ages) >= 3
    assert [record.staleness_max for record in seen.records] == [max(each) for each in ages]
    assert [record.staleness_mean for record in seen.records] == [sum(each) / 2 for each in ages]
    np.testing.assert_allclose(np.cumsum([record.simulated_seconds for record in seen.records]), times)


def mixed(rounds: int, weight: staleness.StalenessWeight, alpha: float) -> tuple[np.ndarray, list[int]]:
    """FedAsync, Xie 2019, Algorithm 1, without a proximal term: the model, and the staleness of each step."""
    versions = [START["w"].astype(np.float64)]
    begun, due, ages = dict.fromkeys(CLIENTS, 0), dict(SECONDS), list[int]()
    now = 0.0
    for version in range(rounds):
        for client in CLIENTS:
            if client not in due and begun[client] < version:
                begun[client], due[client] = version, now + SECONDS[client]
        client = min(due, key=due.__getitem__)
        now, base = due.pop(client), versions[begun[client]]
        a, c = CLIENTS[client].a, CLIENTS[client].c
        own = c + (base - c) * (1 - 0.1 * a) ** -(-CLIENTS[client].num_examples // 4)
        ages.append(version - begun[client])
        share = alpha * weight.weight(ages[-1])
        versions.append((1 - share) * versions[-1] + share * own)
    return versions[-1], ages


@pytest.mark.parametrize("text", ["polynomial(0.5)", "constant", "hinge(10, 1)"])
def test_fedasync_is_algorithm_1_of_its_paper(text: str) -> None:
    strategy = presets.get("fedasync", alpha=0.7, mu=0)
    plan = replace(buffered(1, len(CLIENTS), text, rounds=20), strategy=strategy)
    last, seen = simulate(plan, fleet_of(CLIENTS, Times(SECONDS))[0])
    model, ages = mixed(20, staleness.parse(text), alpha=0.7)
    np.testing.assert_allclose(last.params["w"], model, rtol=2e-6)
    assert max(ages) >= 3
    assert [record.staleness_max for record in seen.records] == ages


def test_equal_clients_that_all_fit_into_the_buffer_give_fedavg_to_the_bit() -> None:
    equal = Times(dict.fromkeys(CLIENTS, 2.0))
    plan = buffered(len(CLIENTS), len(CLIENTS), "constant", strategy="fedavg", rounds=5)
    buffered_state, seen = simulate(plan, fleet_of(CLIENTS, equal)[0])
    average, synchronous = run(
        run_plan("fedavg", clients_per_round=len(CLIENTS), rounds=5),
        MemoryFleet(CLIENTS),
        first_state(plan, START),
    )
    assert bits(buffered_state) == bits(average)
    assert [record.staleness_max for record in seen.records] == [0] * 5
    assert [record.train_loss for record in seen.records] == [each.train_loss for each in synchronous.records]


@pytest.mark.parametrize(
    "strategy", ["fedavg", "fedavgm", "fedprox", "fedadagrad", "fedadam", "fedyogi", "fedbuff", "fedasync"]
)
def test_workers_change_no_bit_of_any_strategy_that_may_be_asynchronous(strategy: str) -> None:
    plan = buffered(3, 4, strategy=strategy, rounds=6)
    one, observed = simulate(plan, fleet_of(CLIENTS, Times(SECONDS), at_once=1)[0])
    many, again = simulate(plan, fleet_of(CLIENTS, Times(SECONDS), at_once=4)[0])
    assert bits(one) == bits(many)
    assert observed.events == again.events
    assert observed.records == again.records


def test_clients_start_when_they_arrive_and_one_that_leaves_does_not_answer() -> None:
    """Two places; of a period of 100 s the slowest client is there for the first half of its work, a later one from 3 s on."""
    first, later = list(CLIENTS)[:2]
    always = [(index, 0.0, 100.0) for index in range(2, len(CLIENTS))]
    times = Times(SECONDS)
    leaves_at = SECONDS[first] / 2
    presence = Presence.of(100.0, [(0, 0.0, leaves_at), (1, 3.0, 100.0), *always], len(CLIENTS))
    object.__setattr__(times, "presence", presence)
    plan = buffered(2, len(CLIENTS), rounds=6)
    last, seen = simulate(plan, fleet_of(CLIENTS, times)[0])
    answered = {event["client"] for event in seen.events if event["event"] == "update_accepted"}
    assert first not in answered, "it left before it was done"
    assert later in answered
    again, _ = simulate(plan, fleet_of(CLIENTS, times, at_once=4)[0])
    assert bits(again) == bits(last)


def test_a_run_whose_clients_are_all_away_goes_on_when_one_arrives() -> None:
    times = Times(dict.fromkeys(CLIENTS, 1.0))
    object.__setattr__(times, "presence", Presence.of(100.0, [(2, 40.0, 50.0)], len(CLIENTS)))
    _, seen = simulate(buffered(1, 2, rounds=3), fleet_of(CLIENTS, times)[0])
    assert [record.accepted for record in seen.records] == [1, 1, 1]
    assert [record.simulated_seconds for record in seen.records] == [41.0, 1.0, 1.0]


def test_every_strategy_but_those_of_one_mode_has_both() -> None:
    only = {name: presets.modes(name) for name in presets.OPTIONS if len(presets.modes(name)) == 1}
    robust = [name for name, options in presets.OPTIONS.items() if "malicious" in options]
    personal = ("fedper", "fedrep", "fedbn", "ditto")
    with_server_data = ("feddf", "fltrust")
    one_model = ("diloco", "fedsgd", "scaffold", "fednova", "feddyn", "qfedavg", "ifca")
    sync = (*one_model, "heterofl", *with_server_data, *personal, *robust)
    assert only == {**dict.fromkeys(sync, ("sync",)), "fedbuff": ("async",), "fedasync": ("async",)}


@pytest.mark.parametrize("strategy", ["fedbuff", "fedasync"])
def test_a_run_resumed_after_any_round_ends_as_the_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    plan = buffered(2, 4, strategy=strategy, rounds=8)
    times = Times(SECONDS, dropping=[("b", 2), ("c", 4)])
    faulty = {"d": "nan"}
    whole, observed = simulate(plan, fleet_of(CLIENTS, times, faulty=faulty)[0])
    for stop in range(1, 8):
        state = stored(tmp_path / str(stop), observed.states[stop - 1], observed, stop)
        fleet, _ = fleet_of(CLIENTS, times, at_once=3, faulty=faulty)
        fleet.resume(state.in_flight, plan)
        rest, again = simulate(plan, fleet, state)
        assert bits(rest) == bits(whole)
        assert again.records == observed.records[stop:]


def stored(folder: Path, state: RunState, observed: Seen, number: int) -> RunState:
    """The state after it was written to a checkpoint, as were those before it, and read by another process."""
    store = CheckpointStore(folder)
    for each in observed.states[:number]:
        store.commit(
            Checkpoint(each.round, each.params, each.strategy, {}, {}, {}, {}, each.best, each.in_flight)
        )
    read = CheckpointStore(folder).load()
    assert read is not None
    needed = len(read.in_flight.bases)
    assert needed <= 4 and len(list((folder / "blobs").iterdir())) <= 2 + needed
    return RunState(read.round, read.params, read.state, read.best, read.in_flight)


def test_a_client_whose_model_is_too_old_must_stop() -> None:
    plan = buffered(2, len(CLIENTS), rounds=10, max_staleness=2)
    _, seen = simulate(plan, fleet_of(CLIENTS, Times(SECONDS))[0])
    stopped = [(each["round"], each["client"]) for each in seen.of("update_rejected")]
    assert {client for _, client in stopped} == {"d", "e", "f"}
    assert {each["reason"] for each in seen.of("update_rejected")} == {"stale_base"}
    assert "3 versions old" in seen.of("update_rejected")[0]["words"]
    assert all(each["staleness"] <= 2 for each in seen.of("update_accepted"))
    assert sum(record.rejections.get("stale_base", 0) for record in seen.records) == len(stopped)


def test_without_staleness_allowed_only_the_newest_model_counts() -> None:
    plan = buffered(2, 5, rounds=4, max_staleness=0)
    _, seen = simulate(plan, fleet_of(CLIENTS, Times(SECONDS))[0])
    assert [record.staleness_max for record in seen.records] == [0] * 4


def test_a_round_ends_with_fewer_updates_if_nobody_is_left() -> None:
    plan = buffered(4, 4, rounds=2, deadline_seconds=5.0, min_updates=2)
    slow = dict.fromkeys(CLIENTS, 50.0) | {"a": 1.0, "b": 1.0}
    last, seen = simulate(plan, fleet_of(CLIENTS, Times(slow))[0])
    assert [(record.accepted, record.silent) for record in seen.records] == [(2, 4), (2, 4)]
    assert {each["reason"] for each in seen.of("client_silent")} == {"not done by the deadline"}
    assert not np.array_equal(last.params["w"], START["w"])


def test_a_round_without_a_quorum_changes_nothing() -> None:
    plan = buffered(3, 3, rounds=2, min_updates=2)
    everyone = [(name, number) for name in CLIENTS for number in (1, 2)]
    last, seen = simulate(plan, fleet_of(CLIENTS, Times(SECONDS, everyone))[0])
    assert bits(last)["w"] == START["w"].tobytes()
    assert [each["round"] for each in seen.of("quorum_missed")] == [1, 2]


def test_faulty_clients_are_rejected_and_their_places_taken() -> None:
    faulty = {"a": "nan", "b": "duplicate", "c": "stale_base"}
    plan = buffered(3, 3, rounds=6)
    _, seen = simulate(plan, fleet_of(CLIENTS, Times(SECONDS), faulty=faulty)[0])
    assert {record.accepted for record in seen.records} == {3}
    reasons = {(each["client"], each["reason"]) for each in seen.of("update_rejected")}
    assert reasons <= {("a", "non_finite"), ("b", "duplicate"), ("c", "stale_base")} and len(reasons) == 3


def test_an_update_out_of_all_proportion_is_left_out() -> None:
    clients = CLIENTS | {"f": MemoryClient(a=1.0, c=1e6)}
    plan = buffered(6, 6, rounds=1, outlier_factor=100.0)
    _, seen = simulate(plan, fleet_of(clients, Times(dict.fromkeys(clients, 1.0)))[0])
    (record,) = seen.records
    assert (record.accepted, record.rejections) == (5, {"outlier": 1})
    assert [each["client"] for each in seen.of("update_excluded")] == ["f"]


@settings(max_examples=40, deadline=None)
@given(
    seconds=st.lists(st.floats(0.1, 20.0), min_size=6, max_size=6),
    buffer=st.integers(1, 5),
    concurrency=st.integers(1, 6),
    oldest=st.sampled_from([None, 0, 1, 3]),
    dropping=st.sets(st.tuples(st.sampled_from("abcdef"), st.integers(1, 6))),
)
def test_whatever_the_speeds_each_version_is_trained_once_a_client_at_most(
    seconds: list[float], buffer: int, concurrency: int, oldest: int | None, dropping: set[tuple[str, int]]
) -> None:
    times = Times(dict(zip(CLIENTS, seconds, strict=True)), dropping)
    fleet, pool = fleet_of(CLIENTS, times, at_once=2)
    plan = buffered(buffer, concurrency, rounds=6, max_staleness=oldest, deadline_seconds=15.0)
    last, seen = simulate(plan, fleet)
    assert last.round == 6
    assert len(pool.trained) == len(set(pool.trained))
    assert pool.most_versions <= concurrency + 1
    for record, state in zip(seen.records, seen.states, strict=True):
        assert record.accepted <= buffer
        assert len(state.in_flight.clients) <= concurrency
        names = [each.client for each in state.in_flight.clients]
        assert len(names) == len(set(names))
        assert set(state.in_flight.bases) == {each.round for each in state.in_flight.clients}
    oldest_base = [each["staleness"] for each in seen.of("update_accepted")]
    assert all(age >= 0 and (oldest is None or age <= oldest) for age in oldest_base)


def test_workers_keep_only_versions_that_clients_at_work_started_from() -> None:
    fleet, pool = fleet_of(CLIENTS, Times(SECONDS | {"f": 1e5}))
    plan = buffered(2, 3, rounds=30, deadline_seconds=1e6)
    _, seen = simulate(plan, fleet)
    assert isinstance(pool, QuadraticPool) and pool.most_versions <= 4
    assert max(len(state.in_flight.bases) for state in seen.states) <= 3
