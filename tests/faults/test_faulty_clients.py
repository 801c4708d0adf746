"""A bad client cannot hurt a round: a federation with one of every kind ends as if those clients had been silent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fedloop
from coordinator.fleets.simulated_clients import SimulatedClient, VirtualTime
from tests.support.cli import options, report_of, run_cli

pytestmark = pytest.mark.slow

ROUNDS = 6
CLIENTS = 12
REASONS = {
    "nan": "non_finite",
    "wrong_shape": "wrong_shape",
    "wrong_dtype": "wrong_dtype",
    "missing_tensor": "missing_tensor",
    "extra_tensor": "extra_tensor",
    "stale_base": "stale_base",
    "no_examples": "no_examples",
    "duplicate": "duplicate",
}
EXPERIMENT: dict[str, Any] = {
    "model": {"name": "mlp"},
    "data": {"partition": "iid"},
    "federation": {
        "clients": CLIENTS,
        "clients_per_round": CLIENTS,
        "rounds": ROUNDS,
        "runtimes": {"torch": 1},
    },
    "local": {"epochs": 3, "lr": 0.1},
    "simulation": {"workers": 1},
}


def test_faulty_clients_are_rejected_by_reason_and_leave_the_model_of_the_honest_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "faulty"
    settings = [
        f"{table}.{key}={json.dumps(value) if not isinstance(value, dict) else '{torch=1}'}"
        for table, keys in EXPERIMENT.items()
        for key, value in keys.items()
    ]
    faults = ", ".join(f"{fault}=1" for fault in REASONS)
    done = run_cli("simulate", "--out", out, *options([*settings, f"simulation.faults={{{faults}}}"]))
    assert done.returncode == 0, done.stderr
    report = report_of(out)
    assert report["rejections"] == dict.fromkeys(sorted(REASONS.values()), ROUNDS)
    assert all(row["rejections"] == dict.fromkeys(REASONS.values(), 1) for row in report["rounds"])
    # Whoever answers twice is honest the first time.
    assert [row["accepted"] for row in report["rounds"]] == [CLIENTS - len(REASONS) + 1] * ROUNDS
    assert f"{ROUNDS} stale_base" in done.stdout

    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    rejected = [event for event in events if event["event"] == "update_rejected"]
    assert all(event["client"] in event["words"] for event in rejected)
    silent = {event["client"] for event in rejected if event["reason"] != "duplicate"}
    assert len(silent) == len(REASONS) - 1

    # The same federation, in which those clients never answer at all.
    def never_answer(clock: VirtualTime, clients: Sequence[SimulatedClient], number: int) -> set[str]:
        return silent & {client.name for client in clients}

    monkeypatch.setattr(VirtualTime, "find_dropouts", never_answer)
    honest = fedloop.simulate(EXPERIMENT, out=tmp_path / "honest").report

    assert [row["silent"] for row in honest["rounds"]] == [len(REASONS) - 1] * ROUNDS
    assert report["final"] == honest["final"]
    assert report["final"]["test_accuracy"] > 0.8


@pytest.mark.extended
def test_a_federation_of_faulty_clients_but_one_learns_from_that_one(tmp_path: Path) -> None:
    experiment = EXPERIMENT | {"simulation": {"workers": 1, "faults": {"nan": CLIENTS - 1}}}
    report = fedloop.simulate(experiment, out=tmp_path / "run").report
    assert [row["accepted"] for row in report["rounds"]] == [1] * ROUNDS
    assert report["final"]["test_loss"] < report["rounds"][0]["test_loss"]


def test_a_round_without_a_single_good_update_changes_nothing(tmp_path: Path) -> None:
    """Clients that train with an absurd step size send no finite number; the model stays the first one."""
    experiment = EXPERIMENT | {"local": {"epochs": 3, "lr": 1e30}}
    result = fedloop.simulate(experiment, out=tmp_path / "run")
    assert [row["accepted"] for row in result.rounds] == [0] * ROUNDS
    assert {row["test_loss"] for row in result.rounds} == {result.report["final"]["test_loss"]}
    assert result.report["rejections"] == {"non_finite": CLIENTS * ROUNDS}
