"""SIGKILL of a coordinator whose run on devices is differentially private: no budget is used twice, and a round has one noise.

Three daemons train. Nobody can draw the noise again, so the model that a killed round ends in shows whether it was drawn once: it must be the
model before the round and the noised sum that was kept before the kill, to the bit.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

import fedloop
from coordinator.db.tables import privacy_ledgers, privacy_spending, runs
from coordinator.demos.local_fleet import LocalFleet
from coordinator.experiments.experiment import resolve
from edge_client.outbox import Ledger
from edge_client.state import State
from edge_client.wire import arrays
from tests.faults.test_kill_coordinator import RUNTIMES, federation, until_finished
from tests.support import databases
from tests.support.cli import run_cli
from tests.support.processes import HANGS_SECONDS
from tests.support.stored import rows, url_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COHORT = len(RUNTIMES)


def experiment(rounds: int, **privacy: Any) -> str:
    document = {
        "name": "private",
        "seed": 3,
        "data": {"dataset": "readings", "input_shape": [8, 8], "classes": 10},
        "model": {"name": "logreg"},
        "federation": {
            "clients": COHORT,
            "clients_per_round": COHORT,
            "rounds": rounds,
            "runtimes": {"litert": 2, "torch": 1},
            "deadline_seconds": 600,
        },
        "local": {"steps": 2, "lr": 0.1},
        "privacy": {"mechanism": "central", "clip_norm": 0.1, "noise_multiplier": 1.0, **privacy},
        "devices": {"patience_seconds": 600},
    }
    return resolve(document, "private", "devices").to_toml()


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    with federation(tmp_path_factory.mktemp("private"), {}) as fleet:
        yield fleet


def test_a_kill_between_noise_and_commit_uses_no_budget_twice_and_draws_no_second_noise(
    on_sqlite: LocalFleet,
) -> None:
    killed_at_both_points(on_sqlite)


@pytest.mark.extended
def test_on_postgresql_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    url = databases.postgres().create()
    with federation(tmp_path_factory.mktemp("private"), {"FEDLOOP_DATABASE_URL": url}) as fleet:
        killed_at_both_points(fleet)


def test_noise_of_ftrl_goes_on_from_its_key_after_a_kill(on_sqlite: LocalFleet) -> None:
    run = begin(on_sqlite, experiment(2, mechanism="ftrl", minimum_separation=1))
    key = on_sqlite.home / "privacy-keys" / run
    dies_at(on_sqlite, run, "privacy.noised:1")
    drawn = key.read_bytes()
    assert len(drawn) == 32 and key.stat().st_mode & 0o777 == 0o600
    dies_at(on_sqlite, run, "privacy.charged:1")  # of the second round
    assert key.read_bytes() == drawn
    on_sqlite.serve()
    until_finished(on_sqlite, run)
    assert not key.exists()
    report = on_sqlite.client.get(f"/runs/{run}/report")["privacy"]
    assert (report["rounds"], ledger(url_of(on_sqlite), run).released) == (2, None)


@pytest.mark.extended
def test_a_kill_before_devices_add_their_noise_charges_the_round_once(on_sqlite: LocalFleet) -> None:
    url = url_of(on_sqlite)
    run = begin(on_sqlite, experiment(1, mechanism="local", clip_norm=0.5))
    dies_at(on_sqlite, run, "privacy.charged:1")
    mine = select(privacy_spending).where(privacy_spending.c.run == run)
    assert ledger(url, run).rounds == 1 and not rows(url, mine)  # no device had a task
    on_sqlite.serve()
    until_finished(on_sqlite, run)
    report = on_sqlite.client.get(f"/runs/{run}/report")
    # Any other update would lie twice the norm away.
    spent = fedloop.epsilon(noise_multiplier=0.5, rounds=1, cohort=1, clients=1, sampling="none").epsilon
    assert report["privacy"]["epsilon"] == ledger(url, run).epsilon == spent
    assert [(row.rounds, row.last_round) for row in rows(url, mine)] == [(1, 1)] * COHORT
    (row,) = report["rounds"]
    assert (row["accepted"], row["train_loss"], row["epsilon"]) == (COHORT, None, spent)
    sent = "clipped to norm 0.5, with noise of standard deviation 0.5 on each value"
    assert {name: treated(on_sqlite, name, run) for name in RUNTIMES} == {name: [sent] for name in RUNTIMES}


def test_rows_of_a_device_are_hidden_by_dp_sgd(on_sqlite: LocalFleet) -> None:
    if not on_sqlite.coordinator.is_running():
        on_sqlite.serve()
    toml = resolve(
        {
            "name": "rows",
            "data": {"dataset": "readings", "input_shape": [8, 8], "classes": 10},
            "model": {"name": "logreg"},
            "federation": {"clients": 1, "clients_per_round": 1, "rounds": 2, "runtimes": {"torch": 1}},
            "local": {"epochs": 1, "batch_size": 32},
            "privacy": {"mechanism": "example", "clip_norm": 1.0, "epsilon": 4.0},
            "devices": {"patience_seconds": 600},
        },
        "rows",
        "devices",
    ).to_toml()
    run: str = on_sqlite.client.post("/runs", {"experiment": toml})["id"]
    until_finished(on_sqlite, run)
    report = on_sqlite.client.get(f"/runs/{run}/report")
    assert 3.9 < report["privacy"]["epsilon"] <= 4 and report["privacy"]["adjacency"] == "add_or_remove_row"
    assert [(row["accepted"], row["train_loss"]) for row in report["rounds"]] == [(1, None)] * 2
    first, second = treated(on_sqlite, "west", run)
    assert first == second and first.startswith(
        "trained by DP-SGD: the gradient of each row clipped to norm 1"
    )
    device = run_cli(
        "device", "show", "west",
        env={"FEDLOOP_HOME": str(on_sqlite.home), "FEDLOOP_COORDINATOR": on_sqlite.operator_url},
    )  # fmt: skip
    assert "with and without any one row of any one device" in " ".join(device.stdout.split())


def treated(fleet: LocalFleet, device: str, run: str) -> list[str]:
    """What the device's ledger says of how its updates were protected."""
    with closing(State(fleet.device_folder(device) / "state")) as state:
        return [entry.treated for entry in Ledger(state).entries() if entry.run == run]


def killed_at_both_points(fleet: LocalFleet) -> None:
    url = url_of(fleet)
    run = begin(fleet, experiment(2))
    dies_at(fleet, run, "privacy.charged:1")
    charged = ledger(url, run)
    once = fedloop.epsilon(
        noise_multiplier=1, rounds=1, cohort=COHORT, clients=COHORT, delta=1e-5, sampling="none"
    )
    assert (charged.rounds, charged.epsilon, charged.released) == (1, once.epsilon, None)
    # The first round has no noise yet; the second one has, and is not committed.
    dies_at(fleet, run, "privacy.noised:2")
    charged = ledger(url, run)
    assert (charged.rounds, charged.released["round"]) == (2, 2)
    (before,) = rows(url, select(runs).where(runs.c.id == run))
    assert before.round == 1
    expected = moved(fleet, before.params, charged.released["blob"])
    fleet.serve()
    until_finished(fleet, run)
    report = fleet.client.get(f"/runs/{run}/report")
    assert report["final"]["model_sha256"] == arrays.sha256(arrays.encode(expected))
    assert [row["accepted"] for row in report["rounds"]] == [COHORT, COHORT]
    assert report["rounds"][1]["train_loss"] > 0
    spent = ledger(url, run)
    assert (spent.rounds, spent.epsilon, spent.released) == (2, charged.epsilon, None)
    assert report["privacy"]["epsilon"] == spent.epsilon and not report["privacy"]["rounds_left"]
    mine = select(privacy_spending).where(privacy_spending.c.run == run)
    assert [(row.rounds, row.last_round) for row in rows(url, mine)] == [(2, 2)] * COHORT
    assert not (fleet.home / "blobs" / charged.released["blob"]).exists()
    shows_what_was_spent(fleet, run, spent.epsilon)


def shows_what_was_spent(fleet: LocalFleet, run: str, epsilon: float) -> None:
    """As commands do, on the coordinator's machine and on a device."""
    environment = {"FEDLOOP_HOME": str(fleet.home), "FEDLOOP_COORDINATOR": fleet.operator_url}
    shown = run_cli("runs", "show", run[:8], env=environment)
    assert shown.returncode == 0, shown.stderr
    assert f"privacy: (epsilon {epsilon:.4g}, delta 1e-05) after 2 rounds" in " ".join(shown.stdout.split())
    assert "0 more rounds" in shown.stdout
    device = run_cli("device", "show", "north", env=environment)
    assert f"private ({run[:8]}): epsilon {epsilon:.4g}, delta 1e-05, 2 rounds" in " ".join(
        device.stdout.split()
    )
    assert set(treated(fleet, "north", run)) == {"scaled down to norm 0.1 at most"}


def begin(fleet: LocalFleet, toml: str) -> str:
    run: str = fleet.client.post("/runs", {"experiment": toml})["id"]
    fleet.coordinator.kill()
    return run


def dies_at(fleet: LocalFleet, run: str, point: str) -> None:
    fleet.serve({"FEDLOOP_FAILPOINT": point}, wait=False)

    def died() -> bool:
        (row,) = rows(url_of(fleet), select(runs).where(runs.c.id == run))
        assert row.state != "failed", row.error
        return not fleet.coordinator.is_running()

    wait_until(died, lambda: f"{point} was never reached", HANGS_SECONDS)
    assert fleet.coordinator.wait(HANGS_SECONDS) == -signal.SIGKILL


def ledger(url: str, run: str) -> Any:
    (row,) = rows(url, select(privacy_ledgers).where(privacy_ledgers.c.run == run))
    return row


def moved(fleet: LocalFleet, params: str, aggregate: str) -> dict[str, np.ndarray]:
    """FedAvg's model after these params and this aggregate."""
    before, delta = (
        arrays.decode((fleet.home / "blobs" / digest).read_bytes()) for digest in (params, aggregate)
    )
    assert max(float(np.abs(value).max()) for value in delta.values()) > 0.01  # noise
    return {
        name: (value.astype(np.float64) + delta.get(name, 0)).astype(np.float32)
        for name, value in before.items()
    }
