"""Cohorts and tasks: whom a round asks and with which seeds follows from the seed, the round and the names alone."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds import plan
from coordinator.rounds.plan import LocalWork
from tests.support.federation import BASE, run_plan

CLIENTS = [f"client-{i}" for i in range(50)]


def cohort(
    number: int, *, seed: int = 7, clients: int = 50, per_round: int = 10, over: float = 1.0
) -> tuple[str, ...]:
    chosen = run_plan(seed=seed, clients_per_round=per_round, over_select=over)
    return plan.choose_cohort(CLIENTS[:clients], chosen, plan.generator(seed, "cohort", number))


@given(
    clients=st.integers(1, 50),
    per_round=st.integers(1, 50),
    over=st.floats(1, 10),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_cohort_is_drawn_without_replacement_in_canonical_order(
    clients: int, per_round: int, over: float, seed: int
) -> None:
    drawn = cohort(1, seed=seed, clients=clients, per_round=per_round, over=over)
    assert len(set(drawn)) == len(drawn) == min(clients, math.ceil(per_round * over))
    positions = [CLIENTS.index(name) for name in drawn]
    assert positions == sorted(positions)
    assert all(position < clients for position in positions)


def test_the_same_seed_and_round_ask_the_same_clients() -> None:
    assert cohort(3) == cohort(3)
    assert cohort(3) != cohort(3, seed=8)


def test_a_round_is_drawn_without_regard_to_the_rounds_before_it() -> None:
    """Each from a generator of its own, so that a resumed run needs no random state."""
    in_turn = [cohort(number) for number in range(1, 20)]
    assert len(set(in_turn)) == len(in_turn)
    assert cohort(19) == in_turn[-1]


def test_every_client_is_selected_about_equally_often() -> None:
    """2,000 rounds of 10 of 50: 400 each, and 5 standard deviations of a binomial around it."""
    requested = Counter(name for number in range(2000) for name in cohort(number))
    spread = 5 * math.sqrt(2000 * 0.2 * 0.8)
    assert all(abs(requested[name] - 400) < spread for name in CLIENTS)


def test_generators_of_different_purposes_and_numbers_differ() -> None:
    first = [
        plan.generator(seed, purpose, *numbers).integers(2**63)
        for seed in (0, 1)
        for purpose in ("cohort", "speed")
        for numbers in ((), (1,), (2,), (1, 2))
    ]
    assert len(set(first)) == len(first)
    again = plan.generator(0, "cohort", 1).random(4)
    np.testing.assert_array_equal(again, plan.generator(0, "cohort", 1).random(4))


def test_a_task_says_what_the_plan_says() -> None:
    chosen = run_plan("fedprox", local=LocalWork(batch_size=8, lr=0.2, epochs=None, steps=30))
    tasks = plan.make_tasks(("x", "y"), 4, BASE, chosen)
    assert [task.position for task in tasks] == [0, 1]
    message = tasks[1].message
    assert (message.round, message.client, message.base) == (4, "y", BASE)
    assert (message.batch_size, message.lr, message.epochs, message.steps) == (8, 0.2, None, 30)
    assert message.rule == {"name": "proximal", "mu": 0.01}


def test_seeds_of_tasks_differ_by_client_and_round_and_recur_across_runs() -> None:
    def seeds(seed: int) -> dict[tuple[str, int], int]:
        chosen = run_plan(seed=seed)
        return {
            (task.message.client, number): task.message.seed
            for number in range(1, 5)
            for task in plan.make_tasks(CLIENTS, number, BASE, chosen)
        }

    assert len(set(seeds(7).values())) == 4 * len(CLIENTS)
    assert seeds(7) == seeds(7)
    assert not set(seeds(7).values()) & set(seeds(8).values())
    assert all(0 <= value < 2**63 for value in seeds(7).values())


def test_the_seed_of_a_task_does_not_depend_on_the_other_clients() -> None:
    (alone,) = plan.make_tasks(("client-9",), 2, BASE, run_plan())
    crowd = plan.make_tasks(CLIENTS, 2, BASE, run_plan())
    assert crowd[9].message.seed == alone.message.seed


def test_seeds_of_tasks_are_first_draws_of_their_own_generators() -> None:
    tasks = plan.make_tasks(("a", "b"), 3, "base", run_plan(seed=2**40))
    expected = [plan.generator(2**40, client, 3).integers(2**63) for client in ("a", "b")]
    assert [task.message.seed for task in tasks] == expected
