"""What one client of a round can do to the model by numbers alone: no more than its share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds import engine, plan
from coordinator.rounds.aggregation import Bounds, UpdateNorms, find_outliers, medians_of_others
from coordinator.rounds.engine import materialize_in
from coordinator.rounds.fleet import OpenRound
from coordinator.rounds.records import RunState
from coordinator.storage.blobs import Blobs
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.client_rules import PlainSGD
from strategies.update import Update
from tests.support import runs
from tests.support.federation import PARAMS, run_plan
from tests.support.memory_fleet import MemoryClient, MemoryFleet, Script, StoringFleet, honest

HUGE = float(np.finfo(np.float32).max)
STRATEGIES = ["fedavg", "fedavgm", "fedprox", "fedadagrad", "fedadam", "fedyogi", "scaffold"]


def sending(**changed: Any) -> Script:
    """A client that says this of its update, such as its `num_examples`, or sends these values as its delta."""

    def script(task: TaskMessage, update: Update) -> Iterator[tuple[float, bytes]]:
        message = {"num_examples": update.num_examples, "train_loss": update.train_loss} | changed
        values = {name: np.broadcast_to(np.float32(changed.get("delta", value)), value.shape).copy()
                  for name, value in update.delta.items()}  # fmt: skip
        extras = {
            stream: {
                name: np.full_like(value, changed.get("extras", value)) for name, value in tensors.items()
            }
            for stream, tensors in update.extras.items()
        }
        steps = -(-message["num_examples"] // task.batch_size)
        yield (
            1.0,
            encode_result(
                task, Update(values, message["num_examples"], steps, message["train_loss"], extras)
            ),
        )

    return script


def fleet_of(*scripts: Script) -> MemoryFleet:
    """Clients a, b, c, … of one size whose optima differ."""
    return MemoryFleet(
        {name: MemoryClient(c=at / 2, script=script) for at, (name, script) in enumerate(zip("abcdefgh", scripts, strict=False))}
    )  # fmt: skip


def guarded(strategy: str = "fedavg", **changed: Any) -> Any:
    """A plan with the bounds that every experiment has unless it says otherwise."""
    return run_plan(
        strategy, **{"outlier_factor": 100.0, "weight_cap": 10.0, "clients_per_round": 4} | changed
    )


def is_finite(state: RunState) -> bool:
    return all(
        np.isfinite(value).all() for value in [*state.params.values(), *state.strategy.arrays.values()]
    )


# Magnitude


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_update_out_of_all_proportion_is_left_out_and_named(strategy: str) -> None:
    attacked = fleet_of(honest(1.0), honest(1.0), sending(delta=HUGE), honest(1.0))
    last, seen = runs.run(guarded(strategy, rounds=2), attacked)
    (first, second) = seen.records
    assert (first.accepted, first.rejected, first.rejections) == (3, 1, {"outlier": 1})
    assert is_finite(last) and second.test_loss is not None and second.test_loss < 100
    (result, _) = seen.of("update_excluded")
    assert (result["round"], result["client"], result["reason"]) == (1, "c", "outlier")
    assert result["norm"] == pytest.approx(HUGE * math.sqrt(6)) and result["limit"] < 1000


def test_without_the_outlier_the_round_is_that_of_the_others() -> None:
    last, seen = runs.run(
        guarded(rounds=1), fleet_of(honest(1.0), honest(1.0), sending(delta=-HUGE), honest(1.0))
    )
    silent = fleet_of(honest(1.0), honest(1.0), lambda task, update: [], honest(1.0))
    assert runs.bits(last) == runs.bits(runs.run(guarded(rounds=1), silent)[0])
    assert [event["event"] for event in seen.events].count("update_accepted") == 4, "each is told once"


def test_a_fleet_that_keeps_client_states_keeps_those_of_the_others_only() -> None:
    _, seen = runs.run(
        guarded("scaffold", rounds=1), fleet_of(honest(1.0), sending(delta=HUGE), honest(1.0), honest(1.0))
    )
    assert sorted(seen.client_states[0]) == ["a", "c", "d"]


def test_control_variates_out_of_all_proportion_are_found_beside_a_small_delta() -> None:
    attacked = fleet_of(honest(1.0), honest(1.0), honest(1.0), sending(extras=1e30))
    last, seen = runs.run(guarded("scaffold", rounds=1), attacked)
    (result,) = seen.of("update_excluded")
    assert (result["client"], result["what"]) == ("d", "control")
    assert all(np.abs(value).max() < 100 for value in last.strategy.arrays.values())


def test_claiming_examples_and_so_steps_makes_no_update_short() -> None:
    claims = sending(delta=1e20, num_examples=2**52)
    _, seen = runs.run(guarded(rounds=1), fleet_of(honest(1.0), honest(1.0), honest(1.0), claims))
    assert [event["client"] for event in seen.of("update_excluded")] == ["d"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", ["in memory", "on disk"])
def test_a_model_that_is_not_finite_is_never_kept_and_the_run_goes_on(
    strategy: str, kept: str, tmp_path: Path
) -> None:
    """All of them send it, so that none is out of proportion; what they come to is beyond float32."""
    (tmp_path / "updates").mkdir()
    plan, names = guarded(strategy, rounds=2), "abcd"
    blobs = Blobs(tmp_path / "blobs")
    clients = {name: MemoryClient(script=sending(delta=HUGE, extras=HUGE)) for name in names}
    fleet = StoringFleet(clients, tmp_path / "updates") if kept == "on disk" else MemoryFleet(clients)
    start = runs.first_state(plan, {**PARAMS, "w": np.full((2, 3), HUGE, np.float32)})
    keep = partial(materialize_in, blobs) if kept == "on disk" else engine.materialize_in_memory
    last, seen = runs.run(plan, fleet, start, materialize=keep)
    assert runs.bits(last) == runs.bits(start) and last.round == 2
    for record in seen.records:
        assert (record.accepted, record.rejected, record.rejections) == (0, 4, {"model_not_finite": 4})
    (result, _) = seen.of("model_not_finite")
    assert list(result["largest_norms"]) == list(names)
    assert list((tmp_path / "blobs").iterdir()) == []
    assert seen.client_states == [{}, {}]


def test_a_frozen_tensor_may_hold_what_it_likes() -> None:
    start = runs.first_state(guarded(), {**PARAMS, "frozen": np.array([-np.inf], np.float32)})
    last, seen = runs.run(guarded(rounds=1), fleet_of(*[honest(1.0)] * 4), start)
    assert seen.records[0].accepted == 4 and runs.bits(last) != runs.bits(start)


def test_the_bound_is_off_where_the_experiment_says_so() -> None:
    _, seen = runs.run(
        guarded(rounds=1, outlier_factor=0.0), fleet_of(honest(1.0), honest(1.0), sending(delta=1e20))
    )
    assert seen.records[0].accepted == 3


def of(*updates: tuple[float, int], params_norm: float = 1.0, factor: float = 100.0) -> list[int]:
    """Positions of the outliers among deltas of these norms and steps."""
    found = {at: UpdateNorms(str(at), norm, steps) for at, (norm, steps) in enumerate(updates)}
    return sorted(find_outliers(found, Bounds(factor, lambda: params_norm, PlainSGD(), 0.1)))


def test_a_new_site_among_converged_ones_is_none() -> None:
    assert of((1e-9, 5), (2e-9, 5), (1e-9, 5), (6.0, 5), params_norm=10.0) == []


def test_a_model_that_starts_at_zero_bounds_by_the_others_steps_alone() -> None:
    assert of((1.0, 1), (2.0, 3), (40.0, 5), (0.5, 2), params_norm=0.0) == []
    assert of((1.0, 1), (2.0, 3), (4000.0, 5), (0.5, 2), params_norm=0.0) == [2]


def test_a_site_of_many_rows_may_take_a_longer_way() -> None:
    assert of((1.0, 10), (1.0, 10), (90.0, 1000), params_norm=5.0) == []


def test_of_two_the_one_out_of_proportion_is_found_and_of_one_nothing_is_reported() -> None:
    assert of((1.0, 1), (1e30, 1)) == [1]
    assert of((0.0, 1), (1e30, 1)) == [1]
    assert of((1e30, 1)) == []


def test_more_than_half_of_a_cohort_is_never_left_out() -> None:
    assert of(*[(10.0**power, 1) for power in range(0, 40, 4)]) == [5, 6, 7, 8, 9]


@given(st.lists(st.floats(0, 1e30), min_size=2, max_size=9))
def test_the_median_of_the_others_is_that_of_a_naive_twin(values: list[float]) -> None:
    naive = [median_low(values[:at] + values[at + 1 :]) for at in range(len(values))]
    assert medians_of_others(values) == naive


def test_scaffold_in_earnest_never_meets_the_bound() -> None:
    """New clients among old ones, one of which takes many steps: control variates follow from deltas."""
    fleet = MemoryFleet(
        {name: MemoryClient(a=1 + at, c=at, num_examples=1 + 40 * at) for at, name in enumerate("abcdefgh")}
    )
    _, seen = runs.run(guarded("scaffold", rounds=25, outlier_factor=20.0), fleet)
    assert seen.of("update_excluded") == []


@settings(max_examples=60)
@given(
    st.sampled_from(STRATEGIES),
    st.lists(
        st.tuples(st.floats(-HUGE, HUGE, width=32), st.integers(1, 2**53), st.floats(-1.7e308, 1.7e308)),
        min_size=1,
        max_size=4,
    ),
)
def test_whatever_finite_numbers_clients_send_params_and_state_are_finite(
    strategy: str, sent: list[tuple[float, int, float]]
) -> None:
    scripts = [
        sending(delta=value, extras=value, num_examples=count, train_loss=loss) for value, count, loss in sent
    ]
    last, seen = runs.run(guarded(strategy, rounds=2, min_updates=1), fleet_of(*scripts))
    assert is_finite(last)
    assert all(math.isfinite(record.train_loss or 0.0) for record in seen.records)


# Weight


def test_a_claim_beyond_all_measure_weighs_ten_times_the_median() -> None:
    """Three honest clients of 8 examples pull by what they pull; the fourth counts for 80, not for 2^53."""
    claims = sending(num_examples=2**53 // 8, delta=1.0)
    honest_ones = [honest(1.0)] * 3
    _, alone = runs.run(guarded(rounds=1, weight_cap=0.0), fleet_of(*honest_ones))
    last, seen = runs.run(guarded(rounds=1), fleet_of(*honest_ones, claims))
    without = alone.states[0].params["w"].astype(np.float64)
    share = 80 / (80 + 24)
    expected = without * (1 - share) + (PARAMS["w"] + 1.0) * share
    np.testing.assert_allclose(last.params["w"], expected, rtol=0, atol=1e-6)
    assert seen.of("weight_capped") == [
        {"event": "weight_capped", "round": 1, "client": "d", "examples": 2**53 // 8, "counted": 80}
    ]
    unbounded, _ = runs.run(guarded(rounds=1, weight_cap=0.0), fleet_of(*honest_ones, claims))
    np.testing.assert_allclose(unbounded.params["w"], PARAMS["w"] + 1.0, rtol=0, atol=1e-6)


def test_the_limit_is_that_of_the_cohorts_median_the_lower_of_two() -> None:
    assert plan.weight_limit([5, 100, 7, 9], 10.0) == 70
    assert plan.weight_limit([5], 2.5) == 12
    assert plan.weight_limit([], 10.0) is None
    assert plan.weight_limit([5, 7], 0.0) is None


def test_a_reopened_round_keeps_the_limit_it_was_opened_with() -> None:
    class Reopening(MemoryFleet):
        def find_open_round(self, round_number: int) -> OpenRound | None:
            base = self.model(PARAMS, {}).base
            return OpenRound(plan.make_tasks("abcd", 1, base, guarded()), population=4, weight_limit=16)

    clients = {name: MemoryClient(script=sending(num_examples=1000)) for name in "abcd"}
    _, seen = runs.run(guarded(rounds=1), Reopening(clients))
    assert [event["counted"] for event in seen.of("weight_capped")] == [16] * 4
