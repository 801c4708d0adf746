"""Simulations with local differential privacy: each client adds all of the noise that hides its update."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.experiments.settings import apply_settings
from coordinator.privacy.audit import canaries, mechanism
from coordinator.privacy.local import LocalSpending, find_local_noise
from coordinator.runs.privacy import plan as privacy
from strategies.privacy import clients
from strategies.privacy.clients import ClientNoise
from strategies.privacy.noise.correlated import Participation
from strategies.privacy.noise.secure import SeededSource
from strategies.update import Update
from tests.support.cli import options, report_of, run_cli

SETS = [
    "data.partition=iid", "model.name=logreg", "federation.clients=60", "federation.clients_per_round=20", "federation.rounds=4",
    "federation.runtimes={ torch = 1 }", "simulation.workers=1", "local.epochs=1", "privacy.mechanism=local",
    "privacy.clip_norm=0.3", "privacy.noise_multiplier=2", "privacy.minimum_separation=2",
]  # fmt: skip


def simulate(out: Path, *sets: str) -> fedloop.Result:
    return fedloop.simulate(apply_settings({}, [*SETS, *sets]), out=out)


def update(length: float) -> Update:
    values = np.random.default_rng(1).normal(size=4000).astype(np.float32)
    return Update({"w": values / np.linalg.norm(values) * length}, 12, 3, 0.5)


@pytest.mark.parametrize("length", [0.01, 5.0])
def test_a_client_sends_its_clipped_update_with_noise_and_nothing_else(length: float) -> None:
    sent = clients.add_noise(update(length), 0.5, 2.0, SeededSource(np.random.default_rng(2)))
    noise = np.asarray(sent.delta["w"]) - np.asarray(update(min(length, 0.5)).delta["w"])
    assert noise.std() == pytest.approx(1.0, rel=0.05)
    assert (sent.num_examples, sent.num_steps) == (1, 1) and math.isnan(sent.train_loss)


def test_a_client_spends_what_a_gaussian_of_half_the_multiplier_does() -> None:
    """Two updates within the norm lie twice the norm apart."""
    spent = LocalSpending(2.0, Participation(6, 2), 1e-5)
    one = fedloop.epsilon(noise_multiplier=1.0, rounds=1, cohort=1, clients=1, sampling="none")
    assert spent.after(1).epsilon == spent.after(2).epsilon == one.epsilon
    assert spent.after(6).epsilon > spent.after(4).epsilon > one.epsilon
    assert spent.after(0).epsilon == 0
    assert "any one client's rows replaced by others" in spent.after(6).in_words()
    found = find_local_noise(Participation(6, 2), 1e-5, 4.0)
    assert 3.98 < LocalSpending(found, Participation(6, 2), 1e-5).after(6).epsilon <= 4


@pytest.mark.parametrize(("claimed", "is_refuted"), [(2.0, False), (8.0, True)])
def test_canaries_refute_a_claim_of_more_noise_than_there_is(claimed: float, is_refuted: bool) -> None:
    noise = ClientNoise(0.5, 2.0, cohort=1, values=1)
    release = mechanism.local_release_of(
        noise, 1000, lambda number: SeededSource(np.random.default_rng(number))
    )
    epsilon = LocalSpending(claimed, Participation(1, 1), 1e-5).after(1).epsilon
    bound = canaries.measure(release, 0.5, 1, 1.0, 1e-5, np.random.default_rng(1), 1000, epsilon)
    assert bound.lower > 1
    assert bound.is_refuted == is_refuted, bound


@pytest.mark.slow
def test_the_model_moves_by_the_mean_of_the_noise_of_clients(tmp_path: Path) -> None:
    still = ("local.lr=1e-12", "federation.rounds=1")
    noised = simulate(tmp_path / "noised", *still)
    plain = simulate(tmp_path / "plain", *still, "privacy.clip_norm=1e-9")
    moved = np.concatenate([(noised.params[name] - plain.params[name]).ravel() for name in noised.params])
    assert moved.std() == pytest.approx(2 * 0.3 / 20**0.5, rel=0.1)
    (row,) = noised.report["rounds"]
    assert row["train_loss"] is None and row["epsilon"] == noised.report["privacy"]["epsilon"]


@pytest.mark.slow
@pytest.mark.extended  # the ledger is that of test_simulated
def test_a_killed_run_goes_on_with_the_same_noise_and_a_robust_rule(tmp_path: Path) -> None:
    sets = [*SETS, "strategy.name=median", "simulation.attack={ name = 'alie', clients = 2 }"]
    whole = fedloop.simulate(apply_settings({}, sets), out=tmp_path / "whole").report
    out = tmp_path / "killed"
    done = run_cli("simulate", "--out", out, *options(sets), env={"FEDLOOP_FAILPOINT": "privacy.charged:3"})
    assert done.returncode == -signal.SIGKILL
    assert run_cli("simulate", "--resume", out).returncode == 0
    assert report_of(out)["final"]["model_sha256"] == whole["final"]["model_sha256"]
    planned = privacy.foresee(experiment.load(None, sets), 60)["epsilon"]
    assert [row["epsilon"] for row in whole["rounds"]] == planned


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["privacy.sampling=fixed"], "privacy.sampling = 'fixed' does not go with"),
        (["privacy.clipping=adaptive"], "would have to tell how long their updates are"),
        (["privacy.secure_aggregation=true"], 'take privacy.mechanism = "distributed"'),
        (["privacy.noise=skellam"], "privacy.noise = 'skellam' is for privacy.mechanism = \"ftrl\" or \"distributed\""),
        (["privacy.minimum_separation=4"], "needs 80 clients"),
        (["uplink.code=qsgd"], "uplink.code = 'qsgd' does not go with"),
        (["strategy.weighting=examples"], "would be told without noise"),
        (["strategy.name=fednova"], "it counts updates by what clients tell of their training"),
        (["federation.mode=async"], "federation.mode = 'async' does not go with"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        experiment.load(None, [*SETS, *settings])
    assert words in str(caught.value)
