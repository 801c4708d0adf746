"""Simulations under central differential privacy: what they report, their budget, and a kill between the noise and the commit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments.experiment import apply_settings
from coordinator.privacy.ledger import FileLedger
from tests.support.cli import options, report_of, run_cli
from tests.support.long import extended

pytestmark = pytest.mark.slow

SETS = [
    "data.partition=iid", "model.name=logreg", "federation.clients=60", "federation.clients_per_round=12", "federation.rounds=4",
    "federation.runtimes={ torch = 1 }", "simulation.workers=1", "local.epochs=1", "privacy.mechanism=central",
    "privacy.clip_norm=0.3", "privacy.noise_multiplier=1",
]  # fmt: skip


def simulate(out: Path, *sets: str) -> dict[str, Any]:
    return run(out, *sets).report


def run(out: Path, *sets: str) -> fedloop.Result:
    return fedloop.simulate(apply_settings({}, [*SETS, *sets]), out=out)


def ledger(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "checkpoint" / "privacy.json").read_text("utf-8"))
    return document


def test_the_report_has_epsilon_after_every_round_with_its_assumptions(tmp_path: Path) -> None:
    report = simulate(tmp_path / "run", "privacy.clipping=adaptive")
    spent = [row["epsilon"] for row in report["rounds"]]
    expected = fedloop.epsilon(noise_multiplier=1, rounds=4, cohort=12, clients=60)
    assert spent == sorted(spent) and spent[-1] == report["privacy"]["epsilon"] == pytest.approx(
        expected.epsilon
    )
    assert report["privacy"]["in_words"] == expected.in_words()
    assert len({row["clip_norm"] for row in report["rounds"]}) == 4
    assert len({row["selected"] for row in report["rounds"]}) > 1  # Poisson sampling
    assert ledger(tmp_path / "run")["rounds"] == 4


def test_a_round_that_would_overspend_does_not_begin_and_the_model_stays(tmp_path: Path) -> None:
    within = fedloop.epsilon(noise_multiplier=1, rounds=2, cohort=12, clients=60).epsilon
    ended = simulate(tmp_path / "ended", f"privacy.budget={within + 0.01}")
    two = simulate(tmp_path / "two", "federation.rounds=2")
    assert len(ended["rounds"]) == 2 and ended["privacy"]["ended_by_budget"]
    assert ended["final"]["model_sha256"] == two["final"]["model_sha256"]
    with pytest.raises(UserError, match="does not suffice for one round"):
        simulate(tmp_path / "none", "privacy.budget=0.1")


def test_a_round_without_clients_adds_its_noise(tmp_path: Path) -> None:
    report = simulate(tmp_path / "run", "federation.clients_per_round=1", "seed=1")
    empty = [row["round"] for row in report["rounds"] if row["selected"] == 0]
    assert empty and report["rounds"][-1]["epsilon"] > 0
    losses = [report["start"]["test_loss"], *(row["test_loss"] for row in report["rounds"])]
    assert all(losses[number] != losses[number - 1] for number in empty)


@pytest.mark.parametrize("point", [*extended("privacy.charged:2"), "privacy.noised:3"])
def test_a_kill_between_noise_and_commit_uses_no_budget_twice(tmp_path: Path, point: str) -> None:
    whole = simulate(tmp_path / "whole")
    out = tmp_path / "killed"
    done = run_cli("simulate", "--out", out, *options(SETS), env={"FEDLOOP_FAILPOINT": point})
    assert done.returncode == -signal.SIGKILL
    charged = ledger(out)
    assert charged["rounds"] == int(point[-1])  # durable before anything of the round was released
    assert charged["epsilon"] == whole["rounds"][charged["rounds"] - 1]["epsilon"]
    assert run_cli("simulate", "--resume", out).returncode == 0
    resumed = report_of(out)
    assert resumed["final"]["model_sha256"] == whole["final"]["model_sha256"]  # the same noise
    assert ledger(out) == ledger(tmp_path / "whole")


def test_a_ledger_charges_a_round_once_and_belongs_to_one_mechanism(tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    FileLedger(path, {"seed": 1}).charge(2, 0.5)
    again = FileLedger(path, {"seed": 1})
    again.charge(1, 0.3)
    assert (again.rounds, again.epsilon) == (2, 0.5)
    with pytest.raises(UserError, match="2 rounds were charged for another mechanism"):
        FileLedger(path, {"seed": 2})
    path.write_text("{", "utf-8")
    with pytest.raises(UserError, match="the privacy ledger is damaged"):
        FileLedger(path, {"seed": 1})


def test_an_update_beyond_the_norm_moves_the_model_no_further_than_the_norm(tmp_path: Path) -> None:
    little = ("federation.rounds=1", "privacy.noise_multiplier=0.05")
    steep = run(tmp_path / "steep", *little, "local.lr=1000", "privacy.clip_norm=0.01")
    start = run(tmp_path / "start", *little, "privacy.clip_norm=1e-9")
    moved = sum(float(np.sum((steep.params[name] - start.params[name]) ** 2)) for name in steep.params) ** 0.5
    accepted = steep.report["rounds"][0]["accepted"]
    assert 0 < moved <= 0.01 * accepted / 12 + 0.001
