"""Clients whose speeds differ a lot: how much simulated time FedBuff and synchronous FedAvg take to the same accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.reports.sweep_curves import simulated_times
from tests.support.cli import options, report_of, run_cli

TARGET = 0.8

SETTINGS = options(
    (
        "model.name=logreg",
        "federation.clients_per_round=10",
        "federation.rounds=30",
        "federation.runtimes={torch=1}",
        "local.epochs=2",
        "simulation.speed_spread=1",
        "simulation.local_baseline=off",
    )
)


@pytest.mark.slow
def test_fedbuff_reaches_the_accuracy_in_half_the_simulated_time_of_fedavg(tmp_path: Path) -> None:
    """Log-normal speeds with sigma 1, digits dealt out by dirichlet(0.3), as many clients at work in both, no over-selection."""
    out = tmp_path / "sweep"
    done = run_cli("sweep", *SETTINGS, "--over", "strategy.name=fedavg,fedbuff", "--out", out)
    assert done.returncode == 0, done.stderr
    reports = [report_of(path.parent) for path in out.glob("*/report.json")]
    seconds = {each["experiment"]["strategy"]["name"]: seconds_to(TARGET, each) for each in reports}
    assert seconds["fedbuff"] <= seconds["fedavg"] / 2
    assert (out / "sweep_time.png").read_bytes().startswith(b"\x89PNG")


def seconds_to(accuracy: float, report: dict[str, Any]) -> float:
    """Simulated seconds until the first round whose model has this accuracy."""
    times = simulated_times(report["rounds"])[1:]
    return next(
        time for time, row in zip(times, report["rounds"], strict=True) if row["test_accuracy"] >= accuracy
    )
