"""A recorded run replays: the same clients in the same order give the same bits, and a trace that does not fit is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from coordinator.errors import UserError
from coordinator.fleets.replayed import ReplayedAsynchronousFleet, ReplayedFleet, make_replay
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.fleets.trace_file import format_trace, read_trace
from coordinator.rounds import asynchronous, engine
from coordinator.rounds.plan import RunPlan
from coordinator.rounds.records import RunState
from coordinator.workers import block
from coordinator.workers.pool import PoolJob, WorkerPool
from coordinator.workers.training import ClientTasks
from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import Examples
from edge_client.processes.channel import Frame
from edge_client.train.trainer import LocalResult, Trainer
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.params import Params, Tensors
from strategies.update import Update
from tests.coordinator.test_asynchronous import CLIENTS, SECONDS, START, buffered, simulate
from tests.coordinator.test_simulated_fleet import NO_ROWS, over_the_channel
from tests.support.federation import run_plan
from tests.support.memory_fleet import MemoryClient, MemoryFleet, honest
from tests.support.quadratic import QuadraticRuntime
from tests.support.quadratic_pool import QuadraticPool, Times, fleet_of
from tests.support.runs import Seen, bits, first_state, run
from tests.support.virtual_time import clock_of


@dataclass
class ParabolaPool:
    """A pool in this process whose clients train on parabolas."""

    clients: Mapping[str, MemoryClient]

    def publish(self, params: Tensors) -> Any:
        self._params = dict(params)
        encoded = arrays.encode(params)

        @dataclass
        class Published:
            sha256: str = arrays.sha256(encoded)
            size_bytes: int = len(encoded)

        return Published()

    def broadcast(self, values: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self._terms = block.RoundTerms.from_json(over_the_channel(values["terms"]))

    def run(self, jobs: Iterable[PoolJob]) -> Iterator[tuple[PoolJob, Frame]]:
        for job in jobs:
            start = block.RoundStart(self._params, {}, self._terms)
            sent = over_the_channel(job.values)
            values, blobs = block.train(start, sent, job.blobs, NO_ROWS, lambda runtime, device_class: self)
            yield job, Frame(over_the_channel(values), tuple(blobs))

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterable[LocalResult]:
        for each in clients:
            known = self.clients[each.client]
            count = known.num_examples
            rows = Examples(np.zeros((count, 1), np.float32), np.zeros(count, np.int32))
            yield Trainer(QuadraticRuntime(known.a, known.c)).train(params, each.task, rows)


def simulated_clients(clients: Mapping[str, MemoryClient]) -> list[SimulatedClient]:
    return [
        SimulatedClient(name, index, client.num_examples, "torch")
        for index, (name, client) in enumerate(clients.items())
    ]


def record(path: Path, seen: Seen) -> Path:
    path.write_text(format_trace(seen.events))
    return path


def broken(task: TaskMessage, update: Update) -> bytes:
    return encode_result(task, replace(update, delta={"w": np.full(2, np.nan, np.float32)}))


CROWD = {
    name: MemoryClient(a=0.5 + 0.3 * at, c=at - 2.0, num_examples=4 + at, script=honest(1.0 + at % 4))
    for at, name in enumerate("abcdefghijkl")
}
CROWD["c"] = replace(CROWD["c"], script=lambda task, update: [])
CROWD["e"] = replace(CROWD["e"], script=lambda task, update: [(0.5, broken(task, update))])
CROWD["g"] = replace(
    CROWD["g"], script=lambda task, update: [(seconds, encode_result(task, update)) for seconds in (1.0, 2.0)]
)
"""Silent, broken and repeating clients among honest ones, as on a real fleet."""


@pytest.mark.parametrize("over_select", [1.0, 1.5])
@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_a_recorded_fleet_replays_to_the_same_bits_in_the_same_order(
    tmp_path: Path, strategy: str, over_select: float
) -> None:
    """The simulation knows none of the faults: they come from the trace."""
    plan = run_plan(strategy, clients_per_round=6, rounds=5, over_select=over_select, records=True)
    start = first_state(plan, START)
    last, seen = run(plan, MemoryFleet(CROWD), start)
    assert {line["outcome"] for each in seen.of("round_answers") for line in each["answers"]} == {
        "accepted", "rejected", "silent",
    }  # fmt: skip
    path = record(tmp_path / "trace.csv", seen)
    pool = cast(WorkerPool, ParabolaPool(CROWD))
    again, fleet = make_replay(path, plan, pool, simulated_clients(CROWD), clock_of([1.0] * 12), 8)
    assert isinstance(fleet, ReplayedFleet)
    replayed, told = run(again, fleet, start)
    assert bits(replayed) == bits(last)
    assert accepted(told) == accepted(seen)
    assert [each.simulated_seconds for each in told.records] == [
        each.simulated_seconds for each in seen.records
    ]
    assert [each.rejections for each in told.records] == [each.rejections for each in seen.records]


def accepted(seen: Seen) -> list[tuple[int, str, float]]:
    return [(each["round"], each["client"], each["seconds"]) for each in seen.of("update_accepted")]


def test_the_trace_of_a_replay_is_the_trace(tmp_path: Path) -> None:
    plan = run_plan(clients_per_round=6, rounds=4, over_select=1.5, records=True)
    _, seen = run(plan, MemoryFleet(CROWD), first_state(plan, START))
    path = record(tmp_path / "trace.csv", seen)
    pool = cast(WorkerPool, ParabolaPool(CROWD))
    again, fleet = make_replay(path, plan, pool, simulated_clients(CROWD), clock_of([1.0] * 12), 8)
    _, told = run(again, cast(ReplayedFleet, fleet), first_state(plan, START))
    assert format_trace(told.events) == path.read_text()


def asynchronous_trace(tmp_path: Path) -> tuple[RunPlan, Path, RunState, Seen]:
    plan = replace(buffered(2, 4, rounds=8, max_staleness=3), records=True)
    times = Times(SECONDS, dropping=[("b", 2), ("c", 4)])
    last, seen = simulate(plan, fleet_of(CLIENTS, times, faulty={"d": "nan"})[0])
    return plan, record(tmp_path / "trace.csv", seen), last, seen


def replayed_fleet(plan: RunPlan, path: Path) -> ReplayedAsynchronousFleet:
    clients = simulated_clients(CLIENTS)
    trace = read_trace(path, list(CLIENTS), plan)
    return ReplayedAsynchronousFleet(QuadraticPool(CLIENTS, at_once=3), clients, trace, path)


def test_a_recorded_asynchronous_run_replays_to_the_same_bits(tmp_path: Path) -> None:
    plan, path, last, seen = asynchronous_trace(tmp_path)
    replayed, told = run(
        plan, replayed_fleet(plan, path), first_state(plan, START), run_rounds=asynchronous.run
    )
    assert bits(replayed) == bits(last)
    assert accepted(told) == accepted(seen)
    assert format_trace(told.events) == path.read_text()


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_replay_resumed_after_any_round_ends_as_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    plan, path, last, _ = asynchronous_trace(tmp_path)
    before = first_state(plan, START)
    half, _ = run(replace(plan, rounds=stop), replayed_fleet(plan, path), before, run_rounds=asynchronous.run)
    fleet = replayed_fleet(plan, path)
    fleet.resume(half.in_flight, plan)
    resumed, _ = run(plan, fleet, half, run_rounds=asynchronous.run)
    assert bits(resumed) == bits(last)


HEADER = "round,order,client,position,started,outcome,reason,seconds,bytes,population\n"
GOOD = "1,1,a,0,1,accepted,,1.0,100,6\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round,client\n", "line 1: the columns are round, client; expected round, order, client"),
        (HEADER + "2,1,a,0,2,accepted,,1.0,9,6\n", "line 2: round = 2, expected round 1"),
        (HEADER + GOOD + "3,1,a,0,3,accepted,,1.0,9,6\n", "line 3: round = 3, expected round 1 or 2"),
        (HEADER + GOOD + "1,3,b,1,1,accepted,,1.0,9,6\n", "line 3: order = 3, expected 2"),
        (HEADER + "1,1,x,0,1,accepted,,1.0,9,6\n", "line 2: client = 'x', expected one of the 6 clients of this run"),
        (HEADER + "1,1,a,-1,1,accepted,,1.0,9,6\n", "line 2: position = '-1', expected a whole number from 0"),
        (HEADER + "1,1,a,0,1,accepted,,soon,9,6\n", "line 2: seconds = 'soon', expected seconds of 0 or more"),
        (HEADER + "1,1,a,0,1,late,,1.0,9,6\n", "line 2: outcome = 'late', expected accepted, rejected, silent"),
        (HEADER + "1,1,a,0,1,rejected,tired,1.0,9,6\n", "line 2: reason = 'tired', expected the code of a rejection"),
        (HEADER + "1,1,a,0,2,accepted,,1.0,9,6\n", "line 2: started = 2, expected 1"),
        (HEADER + "1,1,a,0,1,accepted,,1.0,9,7\n", "line 2: population = 7, expected at most the 6 clients"),
        (HEADER + GOOD + "1,2,b,1,1,accepted,,1.0,9,5\n", "line 3: population = 5, expected 6"),
        (HEADER + GOOD + "1,2,b,0,1,accepted,,1.0,9,6\n", "line 3: position = 0, expected one position for each client"),
        (HEADER + GOOD + "1,2,a,0,1,accepted,,2.0,9,6\n", "line 3: outcome = 'accepted', expected no second update of a"),
        (
            HEADER + GOOD + "".join(f"1,{at + 2},{name},{at + 1},1,accepted,,2.0,9,6\n" for at, name in enumerate("bc")),
            "line 4: outcome = 'accepted', expected at most federation.clients_per_round = 2",
        ),
        (
            HEADER + GOOD + "".join(f"1,{at + 2},{name},{at + 1},1,silent,,2.0,9,6\n" for at, name in enumerate("bc")),
            "line 4: client = 'c', expected at most 2 clients in round 1",
        ),
        (HEADER + GOOD + "2,1,a,1,2,accepted,,1.0,9,6\n", "the positions of round 2 are [1]; expected each from 0 to 0"),
        (HEADER + "1,1,a\n", "line 2: 3 cells, expected 10"),
        (HEADER + GOOD, "has 1 rounds, but federation.rounds = 2"),
    ],
)  # fmt: skip
def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_trace(path, list(CLIENTS), run_plan(clients_per_round=2, rounds=2))


def test_a_trace_that_ends_before_the_run_does_is_refused(tmp_path: Path) -> None:
    """With early stopping a trace may be shorter than federation.rounds, if the replay stops there too."""
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "1,1,a,0,1,accepted,,1.0,100,12\n")
    plan = run_plan(clients_per_round=2, rounds=3, early_stop=2)
    pool = cast(WorkerPool, ParabolaPool(CROWD))
    again, fleet = make_replay(path, plan, pool, simulated_clients(CROWD), clock_of([1.0] * 12), 8)
    with pytest.raises(UserError, match=r"ends after round 1, and this run goes on"):
        run(again, cast(ReplayedFleet, fleet), first_state(plan, START), run_rounds=engine.run)
