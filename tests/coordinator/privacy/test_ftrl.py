"""Simulations with DP-FTRL: correlated noise, clients in turns, exact resumption."""

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
from coordinator.rounds.plan import generator
from coordinator.runs.privacy import plan as privacy
from strategies.privacy.noise.correlated import (
    BandedNoise,
    CorrelatedNoise,
    Participation,
    TreeNoise,
    correlated_matrix,
)
from tests.support.cli import options, report_of, run_cli

SETS = [
    "data.partition=iid", "model.name=logreg", "federation.clients=60", "federation.clients_per_round=12", "federation.rounds=8",
    "federation.runtimes={ torch = 1 }", "simulation.workers=1", "local.epochs=1", "privacy.mechanism=ftrl",
    "privacy.clip_norm=0.3", "privacy.noise_multiplier=1", "privacy.minimum_separation=4",
]  # fmt: skip


STILL = [*SETS, "local.lr=1e-12"]
"""Clients that learn nothing, so that the model moves by noise alone."""

KINDS: dict[str, CorrelatedNoise] = {"banded": BandedNoise(4), "tree": TreeNoise()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fedloop.Result]:
    """A run with each kind of noise."""
    folder = tmp_path_factory.mktemp("ftrl")
    return {
        name: fedloop.simulate(apply_settings({}, [*STILL, f"privacy.noise={name}"]), out=folder / name)
        for name in KINDS
    }


@pytest.mark.slow
def test_the_model_gets_the_noise_of_the_matrix(runs: dict[str, fedloop.Result]) -> None:
    """Both runs begin with the same model, so the noise of one less that of the other is what their models differ by."""

    def sum_of_noise(noise: CorrelatedNoise, tensor: int, shape: tuple[int, ...]) -> np.ndarray:
        row = correlated_matrix(noise, 8).sum(axis=0)
        vectors = [
            generator(7, "privacy", number, tensor).standard_normal(shape) for number in range(len(row))
        ]
        deviation = noise.sensitivity(Participation(8, 4)) * 0.3 / 12
        return deviation * np.tensordot(row, vectors, axes=1)

    banded, tree = runs["banded"].params, runs["tree"].params
    for tensor, name in enumerate(sorted(banded)):
        one, other = (sum_of_noise(noise, tensor, banded[name].shape) for noise in KINDS.values())
        assert np.abs(one - other).max() > 0.05
        np.testing.assert_allclose(banded[name] - tree[name], one - other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_clients_take_turns_and_the_report_says_what_that_spends(
    runs: dict[str, fedloop.Result], name: str
) -> None:
    report = runs[name].report
    spent = [row["epsilon"] for row in report["rounds"]]
    assert spent == sorted(spent)
    assert spent == privacy.foresee(experiment.load(None, [*STILL, f"privacy.noise={name}"]), 60)["epsilon"]
    assert report["privacy"]["noise_multiplier"] == 1
    assert spent[-1] == report["privacy"]["epsilon"] == pytest.approx(4.3772, abs=1e-3)
    assert "takes part again 4 rounds later at the earliest" in report["privacy"]["in_words"]
    lines = (runs[name].out / "events.jsonl").read_text("utf-8").splitlines()
    cohorts = [each["cohort"] for each in map(json.loads, lines) if each["event"] == "round_started"]
    assert [len(cohort) for cohort in cohorts] == [12] * 8
    for first in range(5):
        chosen = [client for cohort in cohorts[first : first + 4] for client in cohort]
        assert len(set(chosen)) == len(chosen)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_noise_that_it_would_have_had(
    runs: dict[str, fedloop.Result], tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    done = run_cli("simulate", "--out", out, *options(STILL), env={"FEDLOOP_FAILPOINT": "privacy.noised:6"})
    assert done.returncode == -signal.SIGKILL
    assert run_cli("simulate", "--resume", out).returncode == 0
    assert report_of(out)["final"]["model_sha256"] == runs["banded"].report["final"]["model_sha256"]


def test_a_plan_foresees_what_the_run_spends() -> None:
    planned = privacy.foresee(experiment.load(None, SETS), 60)
    assert len(planned["epsilon"]) == 8
    assert planned["epsilon"][-1] == pytest.approx(4.3772, abs=1e-3)
    assert planned["noise_multiplier"] == 1
    assert "at most 2 times" in planned["in_words"]


def test_more_rounds_are_refused_on_resume() -> None:
    """The noise was computed for so many rounds."""
    with pytest.raises(UserError, match=r"federation\.rounds was 8, requested is 9"):
        experiment.change(experiment.load(None, SETS), "run", ["federation.rounds=9"])


@pytest.mark.slow
def test_too_few_clients_are_refused_when_a_round_has_as_many_as_by_default(tmp_path: Path) -> None:
    sets = [each for each in SETS if "clients_per_round" not in each]
    with pytest.raises(UserError, match=r"needs 70 clients, 10 .* but there are 60; take at most 6"):
        fedloop.simulate(apply_settings({}, [*sets, "privacy.minimum_separation=7"]), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["privacy.sampling=poisson"], "privacy.sampling = 'poisson' does not go with"),
        (["privacy.clipping=adaptive"], "all rounds need the same clip_norm"),
        (["privacy.bands=5"], "privacy.bands = 5 is more than privacy.minimum_separation = 4"),
        (["privacy.noise=tree", "privacy.bands=2"], 'privacy.bands = 2 is for privacy.noise = "banded"'),
        (["privacy.minimum_separation=6"], "needs 72 clients"),
        (["privacy.mechanism=central"], "privacy.minimum_separation = 4 is for privacy.mechanism"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        experiment.load(None, [*SETS, *settings])
    assert words in str(caught.value)


def test_the_separation_has_to_be_given() -> None:
    with pytest.raises(UserError, match=r"privacy\.minimum_separation is missing"):
        experiment.load(None, SETS[:-1])


def test_defaults_are_as_many_bands_as_the_separation() -> None:
    table = experiment.load(None, SETS).privacy
    assert (table.noise, table.bands, table.sampling, table.accountant) == ("banded", 4, "none", "pld")
