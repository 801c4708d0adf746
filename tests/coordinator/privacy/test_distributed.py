"""Simulations with distributed differential privacy: noise of clients inside secure aggregation."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.experiments.settings import apply_settings
from coordinator.privacy.audit import canaries, mechanism
from coordinator.privacy.distributed import DistributedSpending
from coordinator.runs.privacy import plan as privacy
from coordinator.runs.privacy.by_clients import Sizes
from strategies.privacy.noise.correlated import Participation
from strategies.privacy.noise.distributed import DistributedNoise, GroupNoise, Kind
from strategies.privacy.noise.secure import SeededSource
from strategies.privacy.noised_vector import NoisedVector
from strategies.update import Update
from tests.support.cli import options, report_of, run_cli

SETS = [
    "data.partition=iid", "model.name=logreg", "federation.clients=60", "federation.clients_per_round=24", "federation.rounds=4",
    "federation.runtimes={ torch = 1 }", "simulation.workers=1", "local.epochs=1", "privacy.mechanism=distributed",
    "privacy.secure_aggregation=true", "privacy.clip_norm=0.3", "privacy.noise_multiplier=1", "privacy.group_size=12",
    "privacy.minimum_separation=2",
]  # fmt: skip
VALUES = 650
"""Of an update of `logreg` on digits."""


def simulate(out: Path, *sets: str) -> fedloop.Result:
    return fedloop.simulate(apply_settings({}, [*SETS, *sets]), out=out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["skellam", "discrete_gaussian"])
def test_the_model_moves_by_the_noise_that_clients_add(tmp_path: Path, kind: Kind) -> None:
    """Of 12 clients in a group 9 have to stay, who bring all of the noise; so 12 bring more."""
    still = (f"privacy.noise={kind}", "local.lr=1e-12", "federation.rounds=1")
    noised = simulate(tmp_path / "noised", *still)
    plain = simulate(tmp_path / "plain", *still, "privacy.noise_multiplier=0.05")
    moved = np.concatenate([(noised.params[name] - plain.params[name]).ravel() for name in noised.params])
    deviation = 0.3 * (12 / 9) ** 0.5 * 2**0.5 / 24
    assert moved.std() == pytest.approx(deviation, rel=0.1)
    assert noised.report["rounds"][0]["train_loss"] is None


@pytest.mark.slow
def test_the_report_says_what_was_spent_as_the_plan_foresaw(tmp_path: Path) -> None:
    report = simulate(tmp_path / "run").report
    spent = [row["epsilon"] for row in report["rounds"]]
    assert spent == privacy.foresee(experiment.load(None, SETS), 60, Sizes(VALUES))["epsilon"]
    assert spent[0] == spent[1] < spent[2] == spent[3] == report["privacy"]["epsilon"]  # in turns
    about = fedloop.epsilon(
        noise_multiplier=1, rounds=2, cohort=24, clients=60, sampling="none", accountant="rdp"
    )
    assert about.epsilon < spent[-1] == pytest.approx(about.epsilon, rel=0.05)
    assert "at most 2 times" in report["privacy"]["in_words"]
    assert not any("must be trusted" in each for each in report["privacy"]["outside"])


@pytest.mark.slow
@pytest.mark.extended  # the ledger is that of test_simulated
@pytest.mark.parametrize("point", ["privacy.charged:2", "privacy.noised:3"])
def test_a_killed_run_charges_no_round_twice_and_has_the_same_noise(tmp_path: Path, point: str) -> None:
    whole = simulate(tmp_path / "whole").report
    out = tmp_path / "killed"
    done = run_cli("simulate", "--out", out, *options(SETS), env={"FEDLOOP_FAILPOINT": point})
    assert done.returncode == -signal.SIGKILL
    ledger = json.loads((out / "checkpoint" / "privacy.json").read_text("utf-8"))
    assert ledger["rounds"] == int(point[-1])  # durable before a client adds its noise
    assert run_cli("simulate", "--resume", out).returncode == 0
    assert report_of(out)["final"]["model_sha256"] == whole["final"]["model_sha256"]


@pytest.mark.slow
def test_the_budget_ends_a_run_and_a_robust_rule_spends_what_a_mean_does(tmp_path: Path) -> None:
    planned = privacy.foresee(experiment.load(None, SETS), 60, Sizes(VALUES))["epsilon"]
    robust = ("strategy.name=median", "strategy.malicious=1", "privacy.group_size=8")
    report = simulate(tmp_path / "run", *robust, f"privacy.budget={planned[0] + 0.1}").report
    assert len(report["rounds"]) == 2 and report["privacy"]["ended_by_budget"]
    assert report["privacy"]["epsilon"] == pytest.approx(planned[0], rel=0.01)
    assert report["rounds"][0]["accepted"] == 24


def test_a_group_hides_a_client_as_well_with_as_many_dropouts_as_may_be() -> None:
    group = GroupNoise("skellam", 0.5, 1.0, value_bits=16, threshold=0.67)
    for noise in group.possible(12, 40, VALUES):
        summed = noise.local_variance * noise.fewest * noise.granularity**2
        assert summed == pytest.approx(0.5**2)
        assert noise.fewest >= 0.67 * noise.clients
    assert [noise.clients for noise in group.possible(12, 40, VALUES)] == list(range(3, 24))


def test_the_worst_size_of_a_group_counts() -> None:
    group = GroupNoise("skellam", 0.5, 1.0, value_bits=10, threshold=0.67)
    sums, participation = group.possible(12, 40, VALUES), Participation(6, 2)
    worst = DistributedSpending(sums, participation, 1e-5).after(6)
    each = [DistributedSpending([one], participation, 1e-5).after(6).epsilon for one in sums]
    assert worst.epsilon >= max(each) > min(each)
    assert DistributedSpending(sums, participation, 1e-5).after(5).epsilon == worst.epsilon


def test_noise_for_an_epsilon_spends_it() -> None:
    sets = [each for each in SETS if "noise_multiplier" not in each]
    planned = privacy.foresee(experiment.load(None, [*sets, "privacy.epsilon=4"]), 60, Sizes(VALUES))
    assert 3.95 < planned["epsilon"][-1] <= 4
    assert planned["rounds_within_budget"] == 4


def test_a_sum_tells_no_training_loss() -> None:
    vector = NoisedVector({"w": (VALUES,)}, DistributedNoise("skellam", VALUES, 1.0, 1.0, 3, 3), 7)
    vectors = [
        vector.encode(
            Update({"w": np.zeros(VALUES, np.float32)}, 5, 1, loss), SeededSource(np.random.default_rng(3))
        )
        for loss in (0.1, 90.0)
    ]
    np.testing.assert_array_equal(*vectors)


@pytest.mark.parametrize(("noise_multiplier", "is_refuted"), [(2.0, False), (0.3, True)])
def test_canaries_refute_a_claim_of_more_noise_than_there_is(
    noise_multiplier: float, is_refuted: bool
) -> None:
    claimed = fedloop.epsilon(noise_multiplier=2.0, rounds=1, cohort=1, clients=1, sampling="none").epsilon
    group = GroupNoise("skellam", 0.5, noise_multiplier, value_bits=16, threshold=0.67)
    release = mechanism.secure_release_of(
        group, 1000, lambda number: SeededSource(np.random.default_rng(number))
    )
    bound = canaries.measure(release, 0.5, 1, 1.0, 1e-5, np.random.default_rng(1), 1000, claimed)
    assert bound.is_refuted == is_refuted, bound


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["privacy.sampling=poisson"], "privacy.sampling = 'poisson' does not go with"),
        (["privacy.clipping=adaptive"], "would have to tell how long their updates are"),
        (["privacy.accountant=pld"], 'privacy.accountant = "pld" does not go with'),
        (["privacy.noise=tree"], 'privacy.noise = \'tree\' is not for privacy.mechanism = \'distributed\'; take "skellam"'),
        (["privacy.bands=2"], "privacy.bands = 2 is for privacy.mechanism"),
        (["privacy.minimum_separation=3"], "needs 72 clients"),
        (["strategy.weighting=examples"], "would be told without noise"),
        (["strategy.name=scaffold"], "its clients keep or send more than an update"),
        (["federation.mode=async"], "federation.mode = 'async' does not go with"),
        (["federation.keep=best"], "federation.keep = 'best' does not go with"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        experiment.load(None, [*SETS, *settings])
    assert words in str(caught.value)


def test_shares_of_noise_need_secure_aggregation() -> None:
    sets = [each for each in SETS if "secure_aggregation" not in each and "group_size" not in each]
    with pytest.raises(UserError, match=r"set privacy\.secure_aggregation = true"):
        experiment.load(None, sets)


def test_a_ring_that_does_not_hold_the_noise_is_refused() -> None:
    with pytest.raises(UserError, match=r"privacy\.value_bits = 26, .*above 28"):
        privacy.foresee(experiment.load(None, [*SETS, "privacy.value_bits=26"]), 60, Sizes(VALUES))
