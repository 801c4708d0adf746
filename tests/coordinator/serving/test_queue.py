"""Which requests the next batch has, and which are refused instead."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.serving.profile import Profile
from coordinator.serving.queue import NEVER, Queue, Waiting

PROFILE = Profile({1: 0.011, 10: 0.02, 100: 0.11})
"""10 ms and 1 ms for each row."""


def waiting(deadline: float, rows: int = 1, priority: int = 0, arrived: float = 0.0) -> Waiting:
    return Waiting(np.zeros((rows, 1)), deadline, priority, arrived, lambda *_: None)


def queue(*held: Waiting, max_batch: int = 100) -> Queue:
    made = Queue(max_batch)
    for each in held:
        made.add(each)
    return made


def test_batch_is_the_largest_that_meets_its_earliest_deadline() -> None:
    held = [waiting(0.0155), *(waiting(1.0) for _ in range(20))]
    batch, late = queue(*held).take(0.0, PROFILE)
    assert (len(batch), late) == (5, [])
    assert batch[0] is held[0]


def test_batch_has_no_more_rows_than_the_limit() -> None:
    made = queue(*(waiting(1.0, rows=3) for _ in range(5)), max_batch=10)
    assert [len(made.take(0.0, PROFILE)[0]) for _ in range(3)] == [3, 2, 0]
    assert (made.rows, len(made)) == (0, 0)


def test_request_that_is_late_even_alone_is_refused() -> None:
    held = [waiting(0.01), waiting(1.0)]
    assert queue(*held).take(0.0, PROFILE) == ([held[1]], [held[0]])


def test_margin_is_kept_up_to_a_share_of_the_limit() -> None:
    assert queue(waiting(0.02)).take(0.0, PROFILE, 0.003)[0]
    assert queue(waiting(0.0125)).take(0.0, PROFILE, 0.003)[1]
    assert queue(waiting(0.02)).take(0.0, PROFILE, 100.0)[0]


def test_request_that_would_keep_the_batch_small_is_refused_only_under_load() -> None:
    def taken(more: int) -> tuple[int, int]:
        first = waiting(0.16, arrived=0.0)
        batch, late = queue(first, *(waiting(1.0) for _ in range(more))).take(0.14, PROFILE)
        return len(batch), len(late)

    assert taken(5) == (6, 0)
    assert taken(30) == (10, 0)  # its own batches would have up to 70 rows, and fewer wait
    assert taken(80) == (80, 1)


def test_smaller_priority_goes_first_and_zero_last() -> None:
    held = [waiting(1.0), waiting(2.0, priority=2), waiting(3.0, priority=1)]
    assert queue(*held, max_batch=1).take(0.0, PROFILE)[0] == [held[2]]
    made = queue(*held)
    assert made.take(0.0, PROFILE)[0] == [held[2], held[1], held[0]]


def test_late_request_of_a_lower_priority_is_refused_in_time() -> None:
    """Others fill the batch before it."""
    held = [waiting(0.005), *(waiting(9.0, priority=1) for _ in range(10))]
    batch, late = queue(*held, max_batch=10).take(0.0, PROFILE)
    assert (len(batch), late) == (10, [held[0]])


def test_request_from_a_dead_worker_is_a_batch_by_itself() -> None:
    held = [waiting(1.0), waiting(2.0), waiting(3.0)]
    held[1].attempts = 1
    made = queue(*held)
    assert [made.take(0.0, PROFILE)[0] for _ in range(3)] == [[each] for each in held]


def test_dropped_requests_are_left_out() -> None:
    held = [waiting(1.0), waiting(2.0), waiting(3.0)]
    held[0].is_dropped = held[1].is_dropped = True
    assert queue(*held).take(0.0, PROFILE) == ([held[2]], [])


def test_end_is_told_after_all_rows_that_go_before() -> None:
    made = queue(*(waiting(1.0, rows=10) for _ in range(20)))
    new = waiting(1.0)
    assert made.ends(new, [0.5], PROFILE) == pytest.approx(0.5 + 2 * 0.11 + 0.011)
    assert made.ends(new, [0.5, 0.6], PROFILE) == pytest.approx(0.5 + 0.11 + 0.011)
    assert made.ends(waiting(0.9), [0.5], PROFILE) == pytest.approx(0.511)
    assert made.ends(waiting(5.0, priority=1), [0.5], PROFILE) == pytest.approx(0.511)
    assert queue().ends(new, [0.5], PROFILE) == pytest.approx(0.511)
    assert made.ends(waiting(NEVER), [0.5], PROFILE) == pytest.approx(0.5 + 2 * 0.11 + 0.011)


def test_deadlines_of_held_requests_begin_with_the_first_worker() -> None:
    held = waiting(NEVER)
    held.patience = 0.05
    made = queue(held)
    made.set_deadlines(7.0)
    assert (held.deadline, made.rows) == (7.05, 1)
    assert made.take(8.0, PROFILE)[1] == [held]


@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.5), st.integers(1, 40), st.integers(0, 3), st.booleans()), max_size=40
    ),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.1),
)
def test_each_request_is_once_in_a_batch_or_late_and_every_batch_meets_its_deadlines(
    requests: list[tuple[float, int, int, bool]], starts: float, margin: float
) -> None:
    made = queue()
    held = [waiting(deadline, rows, priority) for deadline, rows, priority, _ in requests]
    for each, (*_, is_dropped) in zip(held, requests, strict=True):
        each.is_dropped = is_dropped
        made.add(each)
    found: list[Waiting] = []
    while len(made):
        batch, late = made.take(starts, PROFILE, margin)
        rows = sum(each.rows for each in batch)
        assert rows <= 100
        if batch:
            assert starts + PROFILE.seconds(rows) <= min(each.last_end(margin) for each in batch)
        found += [*batch, *late]
        starts += 0.01
    assert made.rows == 0
    assert sorted(map(id, found)) == sorted(id(each) for each in held if not each.is_dropped)


def test_rows_within_a_time_are_the_most_that_fit() -> None:
    assert [PROFILE.rows_within(seconds, 100) for seconds in (0.0, 0.0155, 0.02, 5.0)] == [1, 5, 10, 100]


def test_profile_follows_what_batches_take_and_no_single_stall() -> None:
    profile = Profile({1: 0.01})
    profile.observe(1, 1000.0)
    assert profile.seconds(1) < 0.013
    for _ in range(100):
        profile.observe(1, 0.03)
    assert profile.seconds(1) == pytest.approx(0.03, rel=0.01)
    profile.forget()
    assert (profile.seconds(1), profile.margin) == (0.01, 0.0)


def test_margin_covers_nearly_all_latenesses() -> None:
    rng = np.random.default_rng(0)
    profile = Profile({1: 1.0})
    covered = []
    for lateness in rng.normal(0.002, 0.001, 1000):
        covered.append(lateness <= profile.margin)
        profile.observe_lateness(lateness, 1)
    assert np.mean(covered[50:]) > 0.97
    assert profile.margin < 0.01
    assert math.isfinite(profile.margin)
