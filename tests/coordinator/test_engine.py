"""The round engine over clients in memory: who is asked, what counts, when a round closes, what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds import engine, plan
from coordinator.rounds.closing import Closing
from coordinator.rounds.engine import materialize_in
from coordinator.rounds.fleet import (
    Model,
    OpenRound,
    Terms,
    encode_model,
)
from coordinator.rounds.plan import RunPlan, Task
from coordinator.rounds.records import Checkpoint, RoundRecord, RunState, Score, as_row
from coordinator.runs.simulation_store import CheckpointStore
from coordinator.storage.blobs import Blobs
from coordinator.workers import faults
from edge_client.wire import arrays
from edge_client.wire.arrays import StoredArrays, encode_result
from edge_client.wire.device import TaskMessage
from strategies import presets
from strategies.params import Params
from strategies.update import Update
from tests.support import runs
from tests.support.federation import PARAMS, run_plan
from tests.support.memory_fleet import MemoryClient, MemoryFleet, Script, StoringFleet, honest

NAMES = "abcdefghijkl"


def silent(task: TaskMessage, update: Update) -> list[tuple[float, bytes]]:
    return []


def faulty(kind: str, seconds: float = 1.0) -> Script:
    return lambda task, update: [(seconds, payload) for payload in faults.encode_uploads(kind, task, update)]


def fleet_of(*scripts: Script) -> MemoryFleet:
    """Clients a, b, c, … of different sizes, curvatures and optima."""
    return MemoryFleet(
        {
            name: MemoryClient(
                a=1 + 0.3 * i, c=(-1.0) ** i * (1 + i / 3), num_examples=5 + 7 * i, script=script
            )
            for i, (name, script) in enumerate(zip(NAMES, scripts, strict=False))
        }
    )


def everyone(count: int = 6) -> MemoryFleet:
    return fleet_of(*(honest(1.0 + i) for i in range(count)))


# One round


def test_a_round_is_the_weighted_mean_of_its_clients() -> None:
    """Three clients by hand: w + Σ n·delta / Σ n, each delta one pass of gradient descent on its parabola."""
    plan = run_plan(rounds=1, clients_per_round=3)
    last, seen = runs.run(plan, everyone(3))
    w, deltas, sizes = PARAMS["w"].astype(np.float64), [], []
    for i in range(3):
        a, c, n = 1 + 0.3 * i, (-1.0) ** i * (1 + i / 3), 5 + 7 * i
        steps = -(-n // plan.local.batch_size)
        deltas.append((1 - (1 - plan.local.lr * a) ** steps) * (c - w))
        sizes.append(n)
    expected = w + sum(n * delta for n, delta in zip(sizes, deltas, strict=True)) / sum(sizes)
    np.testing.assert_allclose(last.params["w"], expected, rtol=0, atol=1e-6)
    assert last.params["frozen"].tobytes() == PARAMS["frozen"].tobytes()
    (record,) = seen.records
    assert (record.round, record.selected, record.accepted, record.rejected, record.silent) == (1, 3, 3, 0, 0)
    assert record.test_loss == runs.distance(1, last.params).loss


def test_the_quorum_closes_the_round_and_later_arrivals_do_not_count() -> None:
    plan = run_plan(rounds=1, clients_per_round=3, over_select=2.0)
    last, seen = runs.run(plan, everyone(6))
    (record,) = seen.records
    assert (record.selected, record.accepted, record.silent) == (6, 3, 3)
    assert [event["client"] for event in seen.of("update_accepted")] == ["a", "b", "c"]
    alone, _ = runs.run(run_plan(rounds=1, clients_per_round=3), everyone(3))
    assert runs.bits(last) == runs.bits(alone)


def test_over_selection_asks_more_than_it_waits_for() -> None:
    plan = run_plan(rounds=4, clients_per_round=3, over_select=1.5)
    _, seen = runs.run(plan, everyone(12))
    assert [(r.selected, r.accepted, r.silent) for r in seen.records] == [(5, 3, 2)] * 4
    assert all(len(event["cohort"]) == 5 for event in seen.of("round_started"))


def test_over_selection_makes_up_for_silent_and_faulty_clients() -> None:
    fleet = fleet_of(silent, faulty("nan"), *(honest(2.0 + i) for i in range(4)))
    _, seen = runs.run(run_plan(rounds=1, clients_per_round=4, over_select=1.5), fleet)
    (record,) = seen.records
    assert (record.selected, record.accepted, record.rejected) == (6, 4, 1)


def test_an_answer_at_the_deadline_counts_and_one_after_it_does_not() -> None:
    fleet = fleet_of(honest(1.0), honest(10.0), honest(10.001))
    plan = run_plan(rounds=1, clients_per_round=3, deadline_seconds=10.0)
    _, seen = runs.run(plan, fleet)
    (record,) = seen.records
    assert (record.accepted, record.silent) == (2, 1)
    assert [event["client"] for event in seen.of("client_silent")] == ["c"]


def test_too_few_updates_change_nothing_and_say_so() -> None:
    plan = run_plan("fedadam", rounds=2, clients_per_round=3, min_updates=2)
    start = runs.first_state(plan)
    last, seen = runs.run(plan, fleet_of(honest(1.0), silent, faulty("stale_base")), start)
    assert last.round == 2
    assert runs.bits(last) == runs.bits(start)
    assert [(r.accepted, r.rejected, r.silent) for r in seen.records] == [(0, 1, 1)] * 2
    assert seen.of("quorum_missed") == [
        {"event": "quorum_missed", "round": number, "accepted": 1, "min_updates": 2} for number in (1, 2)
    ]
    assert seen.client_states == [{}, {}]


def test_a_round_without_any_answer_goes_on_to_the_next() -> None:
    last, seen = runs.run(run_plan(rounds=2), fleet_of(silent, silent, silent))
    assert last.round == 2
    assert [(r.accepted, r.silent, r.train_loss) for r in seen.records] == [(0, 3, None)] * 2


def test_just_enough_updates_close_the_round_at_the_deadline() -> None:
    fleet = fleet_of(honest(1.0), honest(2.0), silent)
    last, seen = runs.run(run_plan(rounds=1, clients_per_round=3, min_updates=2), fleet)
    assert seen.records[0].accepted == 2
    assert runs.bits(last) != runs.bits(runs.first_state(run_plan()))
    assert not seen.of("quorum_missed")


# What counts


def test_a_duplicate_counts_once() -> None:
    fleet = fleet_of(faulty("duplicate"), honest(2.0), honest(3.0))
    last, seen = runs.run(run_plan(rounds=1), fleet)
    (record,) = seen.records
    assert (record.accepted, record.rejected, record.rejections) == (3, 1, {"duplicate": 1})
    once, _ = runs.run(run_plan(rounds=1), everyone(3))
    assert runs.bits(last) == runs.bits(once)


def test_a_client_may_be_refused_first_and_accepted_later() -> None:
    def second_try(task: TaskMessage, update: Update) -> list[tuple[float, bytes]]:
        return [(0.5, b"torn"), (4.0, encode_result(task, update))]

    last, seen = runs.run(run_plan(rounds=1), fleet_of(second_try, honest(2.0), honest(3.0)))
    (record,) = seen.records
    assert (record.accepted, record.rejections) == (3, {"malformed": 1})
    once, _ = runs.run(run_plan(rounds=1), everyone(3))
    assert runs.bits(last) == runs.bits(once)


def test_a_client_that_claims_more_examples_than_the_plan_allows_is_left_out() -> None:
    _, seen = runs.run(run_plan(rounds=1, max_examples=1), everyone(3))
    assert seen.records[0].rejections == {"too_many_examples": 3}


def test_rejections_are_counted_by_reason_and_reported_in_words() -> None:
    fleet = fleet_of(faulty("nan"), faulty("nan"), faulty("wrong_shape"), faulty("no_examples"), honest(9.0))
    _, seen = runs.run(run_plan(rounds=1, clients_per_round=5), fleet)
    (record,) = seen.records
    assert record.rejections == {"no_examples": 1, "non_finite": 2, "wrong_shape": 1}
    assert (record.accepted, record.rejected) == (1, 4)
    result = {event["client"]: (event["reason"], event["words"]) for event in seen.of("update_rejected")}
    assert result["c"][0] == "wrong_shape"
    assert "delta/w is (5,), expected (2, 3)" in result["c"][1]


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=64), min_size=1, max_size=3))
def test_no_bytes_of_one_client_change_the_round_of_the_others(garbage: list[bytes]) -> None:
    def hostile(task: TaskMessage, update: Update) -> list[tuple[float, bytes]]:
        return [(0.1 * i, payload) for i, payload in enumerate(garbage)]

    last, seen = runs.run(
        run_plan(rounds=1, clients_per_round=4), fleet_of(honest(1.0), honest(2.0), honest(3.0), hostile)
    )
    without, _ = runs.run(
        run_plan(rounds=1, clients_per_round=4), fleet_of(honest(1.0), honest(2.0), honest(3.0), silent)
    )
    assert runs.bits(last) == runs.bits(without)
    assert seen.records[0].rejections == {"malformed": len(garbage)}


def test_bytes_are_counted_as_they_travel() -> None:
    _, seen = runs.run(run_plan(rounds=1), fleet_of(honest(1.0), faulty("duplicate"), silent))
    (record,) = seen.records
    model = arrays.encode(PARAMS)
    assert record.bytes_down == 3 * len(model)
    one = len(
        encode_result(
            TaskMessage(1, "a", arrays.sha256(model), 0, 4, 0.1, 1, None, {}),
            Update({"w": PARAMS["w"]}, 5, 2, 0.5),
        )
    )
    assert abs(record.bytes_up - 3 * one) <= 3 * 32  # the digits of a loss vary


def test_streams_are_counted_as_part_of_the_download() -> None:
    plan = run_plan("scaffold", rounds=1)
    _, seen = runs.run(plan, everyone(3))
    assert seen.records[0].bytes_down == 3 * (len(arrays.encode(PARAMS)) + PARAMS["w"].nbytes)


# A round that was open when the process died


class Reopening(MemoryFleet):
    """A fleet that finds the second round as it was submitted before: another cohort of another population."""

    def __init__(self, clients: Mapping[str, MemoryClient], open_round: OpenRound) -> None:
        super().__init__(clients)
        self._open_round = open_round
        self.submitted: list[tuple[list[str], Terms]] = []

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return self._open_round if round_number == 2 else None

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self.submitted.append(([task.message.client for task in tasks], terms))
        super().submit(tasks, model, terms)


def test_a_reopened_round_goes_on_with_its_own_tasks_and_population() -> None:
    run_plan_ = run_plan("scaffold", rounds=2, clients_per_round=2)
    clients = {name: MemoryClient(c=i - 1.0) for i, name in enumerate("abcdef")}
    base = runs.run(replace(run_plan_, rounds=1), MemoryFleet(clients))[0]
    tasks = plan.make_tasks(("e", "f"), 2, encode_model(base.params, {}).base, run_plan_)
    fleet = Reopening(clients, OpenRound(tasks, population=100))
    last, seen = runs.run(run_plan_, fleet)
    assert fleet.submitted[1][0] == ["e", "f"]
    assert [terms.population for _, terms in fleet.submitted] == [6, 100]
    assert [event["round"] for event in seen.of("round_started")] == [1]  # the other was told when it started
    assert [event["client"] for event in seen.of("update_accepted") if event["round"] == 2] == ["e", "f"]
    few = Reopening(clients, OpenRound(tasks, population=6))
    assert runs.bits(runs.run(run_plan_, few)[0]) != runs.bits(last)  # SCAFFOLD's share is of the population


def test_the_fleet_receives_what_the_round_expects() -> None:
    fleet = Reopening({name: MemoryClient() for name in "abcd"}, OpenRound((), 0))
    runs.run(run_plan(rounds=1, clients_per_round=3, deadline_seconds=9.0), fleet)
    ((_, terms),) = fleet.submitted
    assert (terms.closing, terms.population) == (Closing(3, 9.0), 4)
    assert terms.expected.shapes == {"delta/w": (2, 3)}


def test_a_round_without_clients_changes_nothing() -> None:
    start = runs.first_state(run_plan())
    last, seen = runs.run(run_plan(rounds=1), MemoryFleet({}), start)
    assert runs.bits(last) == runs.bits(start)
    assert (seen.records[0].selected, seen.records[0].accepted) == (0, 0)


# Updates on disk


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "fedyogi", "scaffold"])
@pytest.mark.parametrize("kept", ["in memory", "on disk"])
def test_a_run_over_updates_on_disk_gives_the_same_bits(strategy: str, kept: str, tmp_path: Path) -> None:
    plan = run_plan(strategy, rounds=3, clients_per_round=9)
    blobs = Blobs(tmp_path / "blobs")

    clients = {name: MemoryClient(c=i - 3.7, num_examples=5 + i) for i, name in enumerate(NAMES)}
    fleet = StoringFleet(clients, tmp_path)
    last, _ = runs.run(
        plan,
        fleet,
        materialize=partial(materialize_in, blobs) if kept == "on disk" else engine.materialize_in_memory,
    )
    assert isinstance(last.params, StoredArrays if kept == "on disk" else dict)
    assert runs.bits(last) == runs.bits(runs.run(plan, MemoryFleet(clients))[0])


# The same bits


def opposed(order: Sequence[int]) -> MemoryFleet:
    """Eleven clients of one size that answer in this order; four of them pull apart with a force of 1e10.

    Their pulls cancel exactly, but on the way they swallow what the others say, each time another part of it.
    """
    optima = [1e10, 0.3, -1e10, 0.7, 1e10, -0.2, 0.9, -1e10, 0.1, -0.4, 0.6]
    return MemoryFleet(
        {
            name: MemoryClient(c=c, script=honest(float(turn)))
            for name, c, turn in zip(NAMES, optima, order, strict=False)
        }
    )


@settings(max_examples=40)
@given(st.permutations(range(11)), st.sampled_from(["fedavg", "fedadam", "scaffold"]))
def test_the_order_of_arrival_does_not_change_a_bit(order: list[int], strategy: str) -> None:
    plan = run_plan(strategy, rounds=2, clients_per_round=11)
    shuffled, _ = runs.run(plan, opposed(order))
    straight, _ = runs.run(plan, opposed(range(11)))
    assert runs.bits(shuffled) == runs.bits(straight)


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "fedyogi", "scaffold"])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    strategy: str, stop: int, tmp_path: Path
) -> None:
    def plan(rounds: int) -> RunPlan:
        return run_plan(strategy, rounds=rounds, clients_per_round=4, over_select=1.5)

    full, seen = runs.run(plan(5), everyone(9))

    def commit(state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]) -> None:
        row = as_row(record)
        checkpoints.commit(Checkpoint(state.round, state.params, state.strategy, row, {}, {}, clients))

    checkpoints = CheckpointStore(tmp_path)
    _, first = runs.run(plan(stop), everyone(9), commit=commit)
    checkpoints = CheckpointStore(tmp_path)  # as another process would
    saved = checkpoints.load()
    assert saved is not None
    fleet = everyone(9)
    fleet.restore(saved.client_states)
    rest, second = runs.run(plan(5), fleet, RunState(saved.round, saved.params, saved.state), commit=commit)

    assert runs.bits(rest) == runs.bits(full)
    assert [as_row(r) for r in first.records + second.records] == [as_row(r) for r in seen.records]


def test_scaffold_needs_the_saved_client_states() -> None:
    """What the test above would miss if client states were all zero."""
    plan = run_plan("scaffold", rounds=4, clients_per_round=4)
    full, seen = runs.run(plan, everyone(6))
    forgetful, _ = runs.run(plan, everyone(6), seen.states[1])
    assert runs.bits(forgetful) != runs.bits(full)


def test_only_accepted_clients_renew_their_state() -> None:
    plan = run_plan("scaffold", rounds=1, clients_per_round=2)
    _, seen = runs.run(plan, fleet_of(faulty("nan"), honest(2.0)))
    assert list(seen.client_states[0]) == ["b"]


def test_clients_that_are_not_waited_for_are_called_off() -> None:
    """Those that answered, well or not, have nothing left to be called off for."""
    called_off: list[list[str]] = []

    class Recording(MemoryFleet):
        def cancel(self, tasks: Sequence[Task]) -> None:
            called_off.append([task.message.client for task in tasks])
            super().cancel(tasks)

    scripts = [honest(1.0), faulty("nan", 1.5), honest(2.0), silent, honest(3.0)]
    clients = {name: MemoryClient(script=script) for name, script in zip(NAMES, scripts, strict=False)}
    runs.run(run_plan(rounds=1, clients_per_round=2, over_select=2.5), Recording(clients))
    assert called_off == [["d", "e"]]


# What is told


def test_a_round_is_reported_as_it_happens() -> None:
    _, seen = runs.run(run_plan(rounds=1, clients_per_round=2), fleet_of(faulty("nan"), honest(2.0)))
    assert [event["event"] for event in seen.events] == [
        "round_started",
        "update_rejected",
        "update_accepted",
    ]


def test_a_round_is_committed_before_it_is_reported() -> None:
    order: list[str] = []
    plan = run_plan(rounds=2)
    engine.run(
        plan,
        everyone(3),
        runs.first_state(plan),
        runs.Store(
            lambda state, record, clients: order.append(f"commit {record.round}"),
            lambda record: order.append(f"finished {record.round}"),
        ),
        evaluate=runs.distance,
        emit=lambda event, **values: None,
        monotonic=lambda: 0.0,
    )
    assert order == ["commit 1", "finished 1", "commit 2", "finished 2"]


def test_seconds_hold_evaluation_and_commit() -> None:
    """A clock that each part moves on: 1 s for the evaluation, 10 s for the commit."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    def evaluate(number: int, params: object) -> Score:
        spend(1.0)
        return Score(0.0, 0.0, {})

    committed: list[float] = []
    reported: list[float] = []

    def commit(state: RunState, record: RoundRecord, clients: object) -> None:
        committed.append(record.seconds)
        spend(10.0)

    plan = run_plan(rounds=2)
    engine.run(
        plan, everyone(3), runs.first_state(plan),
        runs.Store(commit, lambda record: reported.append(record.seconds)),
        evaluate=evaluate, emit=lambda event, **values: None, monotonic=lambda: now,
    )  # fmt: skip
    assert (committed, reported) == ([1.0, 1.0], [11.0, 11.0])


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ({}, (None, None, None)),
        ({"a": 0.25}, (0.25, 0.25, 0.25)),
        ({"a": 1.0, "b": 0.0, "c": 0.25, "d": 0.75}, (0.0, 0.5, 1.0)),
        ({"a": 1.0, "b": 0.0, "c": 0.25}, (0.0, 0.25, 1.0)),
    ],
)
def test_the_record_holds_the_spread_of_accuracy_over_clients(
    accuracies: dict[str, float], expected: tuple[float | None, ...]
) -> None:
    _, seen = runs.run(
        run_plan(rounds=1), everyone(3), evaluate=lambda number, params: Score(0.0, 0.5, accuracies)
    )
    (record,) = seen.records
    assert (record.client_accuracy_min, record.client_accuracy_median, record.client_accuracy_max) == expected


def test_figures_without_a_test_are_none() -> None:
    _, seen = runs.run(run_plan(rounds=1), everyone(3), evaluate=lambda number, params: Score(None, None, {}))
    row = as_row(seen.records[0])
    assert {name for name, value in row.items() if value is None} == {
        "test_loss", "test_accuracy", "client_accuracy_min", "client_accuracy_median", "client_accuracy_max", "test_metric",
        "staleness_mean", "staleness_max", "bytes_up_uncompressed", "bytes_down_uncompressed", "epsilon", "clip_norm",
    }  # fmt: skip


def test_accuracies_of_clients_count_where_there_is_no_other() -> None:
    score = Score(None, None, {"a": 0.25, "b": 0.75})
    _, seen = runs.run(run_plan(rounds=1), everyone(3), evaluate=lambda number, params: score)
    (record,) = seen.records
    assert (record.test_accuracy, record.client_accuracy_min, record.client_accuracy_max) == (
        None,
        0.25,
        0.75,
    )


def test_a_round_with_too_few_updates_for_a_robust_rule_leaves_the_model_unchanged() -> None:
    plan = replace(run_plan(rounds=1), strategy=presets.get("median", malicious=1))
    last, seen = runs.run(plan, fleet_of(honest(1.0), silent, honest(2.0)))
    assert (last.params["w"] == PARAMS["w"]).all()
    missed = {"event": "quorum_missed", "round": 1, "accepted": 2, "min_updates": 3}
    assert seen.of("quorum_missed") == [missed]
    assert (seen.records[0].accepted, seen.records[0].rejected) == (0, 0)
    moved, _ = runs.run(plan, fleet_of(honest(1.0), honest(3.0), honest(2.0)))
    assert (moved.params["w"] != PARAMS["w"]).any()


def test_the_evaluation_receives_the_round() -> None:
    numbers: list[int] = []

    def evaluate(number: int, params: object) -> Score:
        numbers.append(number)
        return Score(0.0, 0.0, {})

    runs.run(run_plan(rounds=3), everyone(3), evaluate=evaluate)
    assert numbers == [1, 2, 3]


def test_numbers_that_are_not_finite_are_null_in_the_row() -> None:
    _, seen = runs.run(
        run_plan(rounds=1), everyone(3), evaluate=lambda number, params: Score(float("nan"), 0.5, {})
    )
    row = as_row(seen.records[0])
    assert row["test_loss"] is None
    assert (row["round"], row["test_accuracy"], row["rejections"]) == (1, 0.5, {})


def test_clipping_happens_to_each_update_before_the_mean() -> None:
    plan = replace(run_plan(rounds=1), strategy=presets.get("fedavg", clip_norm=0.001))
    last, _ = runs.run(plan, everyone(3))
    moved = float(np.linalg.norm(last.params["w"] - PARAMS["w"]))
    assert 0 < moved <= 0.001 * (1 + 1e-4)


# When a run ends, and whose model it keeps


def scores(*losses: float | None) -> engine.Evaluate:
    """A score for each round."""
    return lambda number, params: Score(losses[number - 1], None, {})


@pytest.mark.parametrize(
    ("losses", "rounds", "best"),
    [
        ((3.0, 2.0, 1.0, 0.5, 0.25), 5, 5),
        ((3.0, 2.0, 2.0, 2.5, 1.0), 4, 2),
        ((3.0, None, None, 4.0, 1.0), 5, 5),
        ((float("nan"), float("nan"), 1.0, 1.0, 1.0), 2, 0),
        ((1.0, float("inf"), float("nan"), 0.5, 0.5), 3, 1),
    ],
    ids=["always better", "two rounds no better", "unscored rounds do not count", "never finite", "diverged"],
)
def test_a_run_ends_after_rounds_without_a_better_loss(
    losses: tuple[float | None, ...], rounds: int, best: int
) -> None:
    last, seen = runs.run(run_plan(rounds=5, early_stop=2), everyone(3), evaluate=scores(*losses))
    assert (len(seen.records), last.round, last.best.round) == (rounds, rounds, best)
    assert last.best.params is None


def test_the_best_model_is_kept_if_the_plan_says_so() -> None:
    losses = (3.0, 1.0, 2.0, 1.0)
    last, seen = runs.run(run_plan(rounds=4, keep_best=True), everyone(3), evaluate=scores(*losses))
    number, params = last.result(keep_best=True)
    assert number == 2
    np.testing.assert_array_equal(params["w"], seen.states[1].params["w"])
    assert last.result(keep_best=False) == (4, last.params)


def test_rounds_are_compared_by_the_metric_if_the_plan_says_so() -> None:
    figures = (0.5, 0.75, None, 0.75, 0.7, 0.9)
    plan = run_plan(rounds=6, early_stop=2, keep_best=True, by_metric=True)
    last, seen = runs.run(
        plan, everyone(3), evaluate=lambda number, params: Score(9.0 - number, None, {}, figures[number - 1])
    )
    assert (last.round, last.result(keep_best=True)[0]) == (5, 2)
    assert [record.test_metric for record in seen.records] == list(figures[:5])


def test_a_run_without_a_finite_loss_keeps_its_last_model() -> None:
    last, _ = runs.run(run_plan(rounds=2, keep_best=True), everyone(3), evaluate=scores(None, float("nan")))
    assert last.result(keep_best=True) == (2, last.params)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_ends_at_the_same_round_with_the_same_model(stop: int, tmp_path: Path) -> None:
    evaluate = scores(3.0, 1.0, None, 2.0, 1.5, 1.25, 0.5)
    kept_plan = run_plan(rounds=7, early_stop=3, keep_best=True)
    full, _ = runs.run(kept_plan, everyone(5), evaluate=evaluate)

    def commit(state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]) -> None:
        row, best = as_row(record), state.best
        checkpoints.commit(Checkpoint(state.round, state.params, state.strategy, row, {}, {}, clients, best))

    checkpoints = CheckpointStore(tmp_path)
    runs.run(replace(kept_plan, rounds=stop), everyone(5), commit=commit, evaluate=evaluate)
    checkpoints = CheckpointStore(tmp_path)  # as another process would
    saved = checkpoints.load()
    assert saved is not None
    start = RunState(saved.round, saved.params, saved.state, saved.best)
    rest, _ = runs.run(kept_plan, everyone(5), start, commit=commit, evaluate=evaluate)
    assert (rest.round, rest.best.round, rest.best.waited) == (full.round, full.best.round, 3) == (6, 2, 3)
    np.testing.assert_array_equal(rest.result(keep_best=True)[1]["w"], full.result(keep_best=True)[1]["w"])
