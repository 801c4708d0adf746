"""A simulated round costs memory for its cohort: neither the rounds before nor the registered clients add to it."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any, cast

import numpy as np

from coordinator.fleets.simulated import SimulatedFleet
from coordinator.fleets.simulated_clients import SimulatedClient, VirtualTime
from coordinator.rounds.aggregation import aggregate_round
from coordinator.rounds.engine import _start_round, make_terms
from coordinator.rounds.plan import LocalWork
from coordinator.workers.pool import WorkerPool
from strategies import presets
from tests.coordinator.test_simulated_fleet import MODEL, BackwardPool
from tests.support.federation import run_plan

COHORT = 20
ROUNDS = 4


def fleet_of(population: int) -> SimulatedFleet:
    clients = [SimulatedClient(f"client-{index:06}", index % 100, 10, "torch") for index in range(population)]
    clock = VirtualTime(1.0, np.ones(population), np.zeros(population), seed=7)
    return SimulatedFleet(cast(WorkerPool, BackwardPool()), clients, clock)


def play(fleet: SimulatedFleet, rounds: int) -> list[int]:
    """Bytes at the end of each round, and the most during the last one."""
    local = LocalWork(batch_size=4, lr=0.1, epochs=None, steps=1)
    plan = run_plan(clients_per_round=COHORT, local=local)
    plan = type(plan)(**{**vars(plan), "strategy": presets.get("fedavg")})
    sizes = []

    def emit(event: str, **values: Any) -> None:
        pass

    for number in range(1, rounds + 1):
        tracemalloc.reset_peak()
        opened = _start_round(plan, fleet, number, MODEL, emit)
        fleet.submit(opened.tasks, MODEL, make_terms(plan, MODEL, opened))
        assert len(aggregate_round(plan, fleet, opened, MODEL, emit).accepted) == COHORT
        del opened
        cast(BackwardPool, fleet._pool).jobs.clear()
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    return [*sizes, tracemalloc.get_traced_memory()[1]]


def test_rounds_leave_nothing_behind_and_cost_no_more_with_more_clients() -> None:
    """The draw of a cohort without replacement is a permutation, eight bytes a client, and nothing else grows."""
    extra: dict[int, int] = {}
    for population in (2_000, 40_000):
        fleet = fleet_of(population)
        tracemalloc.start()
        play(fleet, 1)
        *sizes, peak = play(fleet, ROUNDS)
        tracemalloc.stop()
        assert max(sizes) - min(sizes) < 20_000
        extra[population] = peak - sizes[-1]
    assert extra[40_000] - extra[2_000] < 40 * 38_000


def test_a_registered_client_costs_a_few_hundred_bytes() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fleet = fleet_of(20_000)
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(fleet.clients(1)) == 20_000
    assert size / 20_000 < 500
