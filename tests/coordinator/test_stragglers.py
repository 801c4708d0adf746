"""Stragglers of a simulated round: how many there are, what they do, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloop
from coordinator.errors import UserError
from coordinator.fleets.stragglers import Stragglers
from coordinator.rounds import plan
from coordinator.rounds.plan import LocalWork, RunPlan
from tests.support.federation import run_plan

CLIENTS = tuple(f"client-{index:03}" for index in range(20))


def plan_with(epochs: int | None, steps: int | None) -> RunPlan:
    return run_plan(local=LocalWork(8, 0.1, epochs, steps))


@given(st.floats(0.01, 1), st.integers(2, 30), st.booleans(), st.integers(1, 99))
def test_a_share_of_a_round_does_a_part_of_the_work(
    share: float, whole: int, in_steps: bool, number: int
) -> None:
    work = plan_with(None, whole) if in_steps else plan_with(whole, None)
    tasks = plan.make_tasks(CLIENTS, number, "0" * 64, work)
    stragglers = Stragglers(share, drops=False, seed=7)

    slowed = stragglers.slow_down(tasks)

    assert len(slowed) == round(share * len(CLIENTS))
    assert slowed == stragglers.slow_down(tasks)
    for position, task in slowed.items():
        message = task.message
        part = message.steps if in_steps else message.epochs
        assert part is not None and 1 <= part < whole
        assert (task.position, message.client) == (position, CLIENTS[position])
        assert (message.seed, message.epochs is None) == (tasks[position].message.seed, in_steps)


def test_parts_are_drawn_anew_and_evenly() -> None:
    stragglers = Stragglers(1.0, drops=False, seed=7)
    parts = [
        task.message.epochs
        for number in range(100)
        for task in stragglers.slow_down(
            plan.make_tasks(CLIENTS, number, "0" * 64, plan_with(6, None))
        ).values()
    ]
    counts = np.bincount([part or 0 for part in parts], minlength=6)
    assert counts[0] == 0 and len(counts) == 6
    assert abs(counts[1:] - 400).max() < 90  # five deviations of a binomial of 2000 and 1/5


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def simulate(tmp_path: Path) -> Run:
    def run(engine: str, stragglers: dict[str, Any] | None) -> dict[str, Any]:
        document = {
            "model": {"name": "mlp", "hidden": [8]},
            "federation": {"clients": 10, "clients_per_round": 10, "rounds": 1, "runtimes": {"torch": 1.0}},
            "local": {"epochs": 4},
            "simulation": {"engine": engine, "workers": 1}
            | ({"stragglers": stragglers} if stragglers else {}),
        }
        report: dict[str, Any] = fedloop.simulate(document, out=tmp_path / f"{engine} {stragglers}").report
        return report

    return run


@pytest.mark.slow
def test_partial_updates_count_or_not(simulate: Run) -> None:
    whole, part, dropped, stacked = (
        simulate("pool", None),
        simulate("pool", {"share": 0.9}),
        simulate("pool", {"share": 0.9, "partial": "drop"}),
        simulate("stacked", {"share": 0.9}),
    )
    assert [each["accepted"] for each in part["rounds"]] == [10]
    assert [each["accepted"] for each in dropped["rounds"]] == [1]
    assert [each["rejected"] for each in dropped["rounds"]] == [0]
    models = {each["final"]["model_sha256"] for each in (whole, part, dropped)}
    assert len(models) == 3
    assert stacked["final"]["test_loss"] == pytest.approx(part["final"]["test_loss"], abs=1e-4)
    # Those whose updates are left out keep the round open until its deadline.
    assert all(each["simulated_seconds"] == 600 for each in dropped["rounds"])
    assert part["rounds"][0]["simulated_seconds"] == whole["rounds"][0]["simulated_seconds"]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"local": {"epochs": 1}}, "local.epochs = 1"),
        ({"federation": {"mode": "async"}}, "federation.mode = 'async'"),
        ({"simulation": {"stragglers": {"share": 1.5}}}, "simulation.stragglers.share = 1.5"),
        ({"strategy": {"name": "fedsgd"}}, "local.steps = 1"),
    ],
)
def test_what_has_no_parts_is_refused(document: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        fedloop.simulate({"simulation": {"stragglers": {"share": 0.5}}, **document}, out=tmp_path / "run")
