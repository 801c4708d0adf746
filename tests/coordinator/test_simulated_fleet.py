"""The simulated fleet decides who answers when; how its workers share the work does not show."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleets.simulated import SimulatedFleet
from coordinator.fleets.simulated_clients import Presence, SimulatedClient
from coordinator.rounds import intake, plan
from coordinator.rounds.aggregation import measure
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import (
    Answer,
    BlockSum,
    Model,
    Silence,
    Terms,
    encode_model,
    singly,
)
from coordinator.rounds.plan import LocalWork, Task
from coordinator.workers import block
from coordinator.workers.pool import PoolJob, WorkerPool
from coordinator.workers.training import ClientTasks, Stack
from coordinator.workers.workspace_arrays import Workspace
from edge_client.processes.channel import Frame
from edge_client.train.trainer import LocalResult
from strategies import presets, summation
from strategies.params import Params, Tensors
from strategies.strategy import BLOCK, Strategy
from strategies.summation import clamp
from strategies.update import Update
from tests.support.federation import PARAMS, run_plan, update
from tests.support.virtual_time import clock_of

SECONDS = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 1.0}
"""When each client answers: one local step, times a factor of its own."""


class BackwardPool:
    """A pool that takes jobs `at_once` and answers them last first; clients do not train, but send what `update` draws."""

    def __init__(self, at_once: int = 1, *, stacked: bool = False) -> None:
        self._at_once = at_once
        self._trainer = Drawing(stacked)
        self._terms: block.RoundTerms | None = None
        self.jobs: list[dict[str, Any]] = []

    @property
    def drawn(self) -> list[str]:
        """Clients in the order in which their jobs were taken."""
        return [client for job in self.jobs for client in job["clients"]]

    def publish(self, params: Tensors) -> None:
        pass

    def broadcast(self, values: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self._terms = block.RoundTerms.from_json(over_the_channel(values["terms"]))

    def run(self, jobs: Iterable[PoolJob]) -> Iterator[tuple[PoolJob, Frame]]:
        waiting: list[PoolJob] = []
        for job in jobs:
            self.jobs.append(job.values)
            waiting.append(job)
            if len(waiting) == self._at_once:
                while waiting:
                    yield self._done(waiting.pop())
        while waiting:
            yield self._done(waiting.pop())

    def _done(self, job: PoolJob) -> tuple[PoolJob, Frame]:
        assert self._terms is not None
        start = block.RoundStart({}, {}, self._terms)
        sent = over_the_channel(job.values)
        values, blobs = block.train(
            start, sent, job.blobs, NO_ROWS, lambda runtime, device_class: self._trainer
        )
        return job, Frame(over_the_channel(values), tuple(blobs))


@dataclass(frozen=True)
class Drawing:
    """Clients send what `update` draws, one by one or as a stack."""

    stacked: bool = False

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterable[LocalResult] | Stack:
        made = [
            replace(update({"w": PARAMS["w"]}, seed=each.task.seed), num_steps=each.task.steps or 5)
            for each in clients
        ]
        if not self.stacked:
            return [LocalResult(each, {}) for each in made]
        deltas = {"w": np.stack([each.delta["w"] for each in made])}
        losses = np.array([each.train_loss for each in made])
        return Stack(deltas, np.array([each.num_steps for each in made]), losses)


NOTHING = np.zeros(0, np.int64)
NO_ROWS = Workspace(
    x=NOTHING,
    y=NOTHING,
    test_rows=NOTHING,
    owners=np.zeros(0, np.int32),
    parts=np.zeros(1000, np.int64),
    ends=np.arange(10, 1001, 10),
    sites=np.zeros(0, np.int32),
)
"""Ten rows for each client, of nothing."""


def over_the_channel(values: dict[str, Any]) -> dict[str, Any]:
    """The values as they arrive: keys are text, tuples are lists."""
    parsed: dict[str, Any] = json.loads(json.dumps(values))
    return parsed


def fleet(
    pool: BackwardPool, *, dropout: float = 0.0, fault: str | None = None, presence: Presence | None = None
) -> SimulatedFleet:
    clients = [
        SimulatedClient(name, index, 10 * (index + 1), "torch", fault if name == "c" else None)
        for index, name in enumerate(SECONDS)
    ]
    return SimulatedFleet(cast(WorkerPool, pool), clients, clock_of(SECONDS.values(), dropout, presence))


def tasks(model: Model, **work: Any) -> Sequence[Task]:
    local = LocalWork(**{"batch_size": 4, "lr": 0.1, "epochs": None, "steps": 1} | work)
    return plan.make_tasks(tuple(SECONDS), 1, model.base, run_plan(local=local))


MODEL = encode_model(PARAMS, {})


def submit(simulated: SimulatedFleet, *, until: float = 100.0, wanted: int = 99, **work: Any) -> None:
    expected = intake.make_expected({"w": PARAMS["w"]}, {})
    simulated.submit(tasks(MODEL, **work), MODEL, Terms(expected, Closing(wanted, until), len(SECONDS)))


def arrivals(simulated: SimulatedFleet) -> list[tuple[str, float]]:
    return [
        (result.task.message.client, result.seconds)
        for result in simulated.results()
        if isinstance(result, Answer)
    ]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_results_come_in_virtual_time_however_the_workers_finish(at_once: int) -> None:
    simulated = fleet(BackwardPool(at_once))
    submit(simulated)
    assert arrivals(simulated) == [("b", 1.0), ("d", 1.0), ("c", 2.0), ("a", 3.0)]


def test_clients_are_trained_in_the_order_in_which_they_answer() -> None:
    pool = BackwardPool(at_once=1)
    simulated = fleet(pool)
    submit(simulated)
    results = simulated.results()
    next(results)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert pool.drawn == ["b", "d"]


def test_results_end_with_the_last_one_wanted_and_nobody_else_is_trained() -> None:
    pool = BackwardPool(at_once=1)
    simulated = fleet(pool)
    submit(simulated, wanted=3)
    assert arrivals(simulated) == [("b", 1.0), ("d", 1.0), ("c", 2.0)]
    assert pool.drawn == ["b", "d", "c"]


def test_a_client_too_late_is_never_trained() -> None:
    pool = BackwardPool(at_once=2)
    simulated = fleet(pool)
    submit(simulated, until=2.5)
    results = list(simulated.results())
    assert pool.drawn == ["b", "d", "c"]
    assert [(r.task.message.client, r.reason) for r in results if isinstance(r, Silence)] == [
        ("a", "not done by the deadline")
    ]


def test_a_client_that_drops_out_is_silent_and_never_trained() -> None:
    pool = BackwardPool(at_once=2)
    simulated = fleet(pool, dropout=1.0)
    submit(simulated)
    results = list(simulated.results())
    assert pool.drawn == []
    assert [(r.task.message.client, r.reason) for r in results if isinstance(r, Silence)] == [
        (name, "dropped out") for name in SECONDS
    ]


def test_a_round_begins_with_the_clients_that_are_there() -> None:
    """Of a period of 100 s, a and c are there in the first half, b and d in the second."""
    presence = Presence.of(100.0, [(0, 0.0, 50.0), (1, 50.0, 100.0), (2, 0.0, 50.0), (3, 50.0, 100.0)], 4)
    simulated = fleet(BackwardPool(), presence=presence)
    assert simulated.clients(4) == ["a", "c"]
    submit(simulated, wanted=1)
    assert arrivals(simulated)[0] == ("c", 2.0)
    assert simulated.simulated_seconds() == 2.0


def test_a_round_waits_in_virtual_time_until_somebody_is_there() -> None:
    presence = Presence.of(100.0, [(1, 30.0, 40.0)], 4)
    simulated = fleet(BackwardPool(), presence=presence)
    assert simulated.clients(4) == ["b"]
    submit(simulated, wanted=1)
    assert arrivals(simulated) == [("b", 1.0)]
    assert simulated.simulated_seconds() == 31.0
    assert simulated.clients(4) == ["b"], "still there at 31"
    assert simulated.simulated_seconds() == 0.0


def test_a_client_that_leaves_before_it_is_done_is_silent() -> None:
    presence = Presence.of(100.0, [(0, 0.0, 2.5), *((index, 0.0, 100.0) for index in (1, 2, 3))], 4)
    simulated = fleet(BackwardPool(), presence=presence)
    submit(simulated)
    silent = [each for each in simulated.results() if isinstance(each, Silence)]
    assert [(each.task.message.client, each.reason) for each in silent] == [("a", "left before it was done")]


def test_time_is_counted_in_local_steps() -> None:
    """Clients of 10, 20, 30 and 40 examples, two epochs in batches of 4: 6, 10, 16 and 20 steps."""
    simulated = fleet(BackwardPool(at_once=4))
    submit(simulated, epochs=2, steps=None)
    assert arrivals(simulated) == [("b", 10.0), ("a", 18.0), ("d", 20.0), ("c", 32.0)]


def test_two_uploads_of_one_client_arrive_together_and_the_second_is_a_duplicate() -> None:
    simulated = fleet(BackwardPool(at_once=4), fault="duplicate")
    submit(simulated)
    answers = [result for result in simulated.results() if isinstance(result, Answer)]
    assert [answer.task.message.client for answer in answers] == ["b", "d", "c", "c", "a"]
    assert [getattr(answer.verdict, "reason", None) for answer in answers] == [
        None, None, None, "duplicate", None,
    ]  # fmt: skip


def test_a_job_names_rows_runtime_and_fault_of_its_client() -> None:
    pool = BackwardPool(at_once=4)
    simulated = fleet(pool, fault="nan")
    submit(simulated)
    assert len(list(simulated.results())) == 4
    jobs = {job["clients"][0]: job for job in pool.jobs}
    kinds = [block.Kind(None, 1, "torch", None, 1)]
    assert {name: (job["parts"], job["kinds"], job["faults"]) for name, job in jobs.items()} == {
        "a": ([0], kinds, {}), "b": ([1], kinds, {}), "c": ([2], kinds, {2: "nan"}), "d": ([3], kinds, {}),
    }  # fmt: skip


# Partial sums


def crowd(
    pool: BackwardPool, seconds: Sequence[float], faults: Mapping[int, str], clients_per_job: int = BLOCK
) -> SimulatedFleet:
    """As many clients as there are `seconds`, in which each answers."""
    names = [f"{index:02}" for index in range(len(seconds))]
    clients = [
        SimulatedClient(name, index, 10, "torch", faults.get(index)) for index, name in enumerate(names)
    ]
    return SimulatedFleet(cast(WorkerPool, pool), clients, clock_of(seconds), clients_per_job)


def fold(
    simulated: SimulatedFleet, names: Sequence[str], strategy: Strategy, wanted: int, *, in_blocks: bool,
    excluded: Collection[int] = (), relays: bool = False,
) -> tuple[list[Any], Any]:  # fmt: skip
    """What the fleet answers without tensors, and the bits of what is folded."""
    local = LocalWork(batch_size=4, lr=0.1, epochs=None, steps=1)
    round_tasks = plan.make_tasks(names, 1, MODEL.base, run_plan(local=local))
    how = summation.of(strategy) if in_blocks and not relays else None
    expected = intake.make_expected({"w": PARAMS["w"]}, {}, weight_limit=8)
    simulated.submit(round_tasks, MODEL, Terms(expected, Closing(wanted, 100.0), len(names), how, in_blocks))
    folded, reported = strategy.start(len(names)), []
    for result in singly(simulated.results(excluded)):
        if isinstance(result, BlockSum):
            assert in_blocks and not relays
            folded.add_partial(result.block, result.partial, result.last_block)
            continue
        assert isinstance(result, Answer)
        verdict: Any = result.verdict
        if not isinstance(verdict, intake.Rejection):
            verdict = (verdict.num_examples, measure(result.task.message.client, verdict))
            if isinstance(result.verdict, Update) and result.task.position not in excluded:
                folded.add(result.task.position, strategy.transform(clamp(result.verdict, 8)))
        reported.append((result.task, result.seconds, result.payload_bytes, verdict))
    try:
        total = folded.finish()
    except ValueError:
        return reported, None
    bits = {name: value.tobytes() for name, value in total.delta.items()}
    return reported, (bits, total.num_updates, total.num_examples, total.train_loss)


@settings(deadline=None, max_examples=60)
@given(
    seconds=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=2 * BLOCK + 5),
    faulty=st.dictionaries(st.integers(0, 20), st.sampled_from(["nan", "duplicate", "stale_base"]), max_size=6),
    excluded=st.sets(st.integers(0, 20), max_size=2),
    wanted=st.integers(1, 25),
    at_once=st.integers(1, 4),
    clients_per_job=st.sampled_from([1, BLOCK, 2 * BLOCK]),
    options=st.sampled_from([{}, {"weighting": "uniform"}, {"clip_norm": 0.1}]),
    stacked=st.booleans(),
    relays=st.booleans(),
)  # fmt: skip
def test_sums_of_blocks_give_the_bits_and_the_answers_of_single_updates(
    seconds: list[float], faulty: dict[int, str], excluded: set[int], wanted: int, at_once: int,
    clients_per_job: int, options: dict[str, Any], stacked: bool, relays: bool,
) -> None:  # fmt: skip
    strategy = presets.get("fedavg", **options)
    names = [f"{index:02}" for index in range(len(seconds))]
    singly = fold(
        crowd(BackwardPool(1), seconds, faulty), names, strategy, wanted, in_blocks=False, excluded=excluded
    )
    pool = BackwardPool(at_once, stacked=stacked)
    in_blocks = fold(
        crowd(pool, seconds, faulty, clients_per_job), names, strategy, wanted, in_blocks=True, excluded=excluded,
        relays=relays,
    )  # fmt: skip
    assert in_blocks == singly
    assert set(pool.drawn) == {task.message.client for task, *_ in singly[0]}


def test_a_job_holds_whole_blocks_of_clients_that_the_round_needs() -> None:
    pool = BackwardPool()
    fold(
        crowd(pool, [1.0] * 30, {}), [f"{i:02}" for i in range(30)], presets.get("fedavg"), 20, in_blocks=True
    )
    assert [len(job["clients"]) for job in pool.jobs] == [8, 8, 4]
    assert list(chain(*(job["positions"] for job in pool.jobs))) == list(range(20))


def test_only_blocks_that_replace_a_rejected_client_are_trained_again() -> None:
    pool = BackwardPool()
    fold(
        crowd(pool, [1.0] * 30, {3: "nan"}),
        [f"{i:02}" for i in range(30)],
        presets.get("fedavg"),
        20,
        in_blocks=True,
    )
    assert [job["positions"] for job in pool.jobs[3:]] == [list(range(16, 21))]
    job = pool.jobs[3]
    assert [block.Kind(*job["kinds"][each]).wave for each in job["kind_of"]] == [1, 1, 1, 1, 2]
