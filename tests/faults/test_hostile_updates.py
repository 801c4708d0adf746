"""Well-formed updates that mean harm, over the device API and on either database: numbers without measure."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from coordinator.db.store import Database
from coordinator.fleets.device import DeviceFleet
from coordinator.rounds.engine import materialize_in
from coordinator.rounds.records import RunState
from edge_client.wire.device import TaskMessage
from strategies.update import Update
from tests.support import runs
from tests.support.databases import database, database_url
from tests.support.device_cohort import Changed, Cohort, ScriptedDevice
from tests.support.device_world import serving
from tests.support.federation import PARAMS, run_plan
from tests.support.runs import Seen

__all__ = ["database", "database_url"]

HUGE = np.finfo(np.float32).max


def attacked(
    folder: Path, database: Database, attack: Changed, strategy: str, rounds: int
) -> tuple[RunState, Seen]:
    """Rounds of three honest devices and one that sends what `attack` makes of its update."""
    with serving(folder, database, lease_seconds=1e6) as world:
        fleet = DeviceFleet(world.services, world.start_run("r"), patience_seconds=60)
        devices = {name: ScriptedDevice(world.enrol(name), 1.0, at / 2, 1.0) for at, name in enumerate("abc")}
        devices["d"] = ScriptedDevice(world.enrol("d"), 1.0, 0.0, 1.0, attack)
        Cohort(world, devices)
        plan = run_plan(strategy, rounds=rounds, clients_per_round=4, outlier_factor=100.0, weight_cap=10.0)
        last, seen = runs.run(plan, fleet, materialize=partial(materialize_in, world.services.blobs))
        return RunState(last.round, dict(last.params), last.strategy), seen


def huge(task: TaskMessage, update: Update) -> Update:
    return replace(update, delta={name: np.full_like(value, HUGE) for name, value in update.delta.items()})


def claiming(task: TaskMessage, update: Update) -> Update:
    """A trillion examples: so that the model moves by what it wants, which is 1."""
    count = 2**40
    delta = {name: np.ones_like(value) for name, value in update.delta.items()}
    return replace(update, delta=delta, num_examples=count, num_steps=count // task.batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavgm", "fedadam"])
def test_one_of_four_devices_cannot_send_the_model_to_infinity(
    tmp_path: Path, database: Database, strategy: str
) -> None:
    last, seen = attacked(tmp_path, database, huge, strategy, rounds=2)
    assert np.isfinite(last.params["w"]).all() and np.abs(last.params["w"]).max() < 10
    assert [(record.accepted, record.rejections) for record in seen.records] == [(3, {"outlier": 1})] * 2
    assert [event["client"] for event in seen.of("update_excluded")] == ["d", "d"]


@pytest.mark.slow
def test_one_of_four_devices_weighs_no_more_than_ten(tmp_path: Path, database: Database) -> None:
    last, seen = attacked(tmp_path, database, claiming, "fedavg", rounds=1)
    (result,) = seen.of("weight_capped")
    assert (result["client"], result["examples"], result["counted"]) == ("d", 2**40, 1000)
    w = PARAMS["w"].astype(np.float64)
    steps = 1 - 0.9**25  # of lr 0.1 on a parabola of curvature 1, in one epoch of 100 examples
    honest = sum(100 * steps * (at / 2 - w) for at in range(3))
    np.testing.assert_allclose(last.params["w"], w + (honest + 1000 * 1.0) / 1300, rtol=0, atol=1e-5)
