"""The accountant agrees with published figures, bounds what it composes, and says what it assumes."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.privacy.accountant import (
    AccountantName,
    CannotAccount,
    NoisyRound,
    Sampling,
    Spending,
    epsilon_after,
    find_noise,
)
from coordinator.privacy.correlated import CorrelatedSpending
from coordinator.runs.privacy.plan import foresee
from strategies.privacy.noise.correlated import Participation, TreeNoise
from tests.support.long import extended

TABLE = [
    # cohort, clients, noise, rounds; epsilon by the classic conversion, by the tight one, by PLD
    (1, 100, 4.0, 10_000, 1.2586, 1.0355, 0.9470),
    (256, 60_000, 1.12, 14_062, 2.9222, 2.5186, 2.3102),
    *extended(
        (256, 60_000, 1.3, 3_515, 1.1921, 0.9544, 0.8645), (256, 60_000, 1.1, 14_062, 3.0083, 2.5966, 2.3817)
    ),
]


@pytest.mark.parametrize(("cohort", "clients", "noise", "rounds", "classic", "tight", "pld"), TABLE)
def test_epsilons_are_those_of_the_table(
    cohort: int, clients: int, noise: float, rounds: int, classic: float, tight: float, pld: float
) -> None:
    wanted: dict[AccountantName, float] = {"rdp_classic": classic, "rdp": tight, "pld": pld}
    found = {
        accountant: round(
            fedloop.epsilon(
                noise_multiplier=noise, rounds=rounds, cohort=cohort, clients=clients, accountant=accountant
            ).epsilon,
            4,
        )
        for accountant in wanted
    }
    assert found == wanted


def test_a_single_gaussian_has_its_exact_epsilon() -> None:
    single = NoisyRound(1.0, "none", 1, 1)
    assert epsilon_after(single, 1, 1e-5).epsilon == pytest.approx(4.3772, abs=5e-5)


def test_rounds_asked_for_one_by_one_spend_what_they_spend_together() -> None:
    kind = NoisyRound(1.0, "poisson", 200, 2000)
    spending = Spending(kind, 1e-5, "pld")
    one_by_one = [spending.after(rounds).epsilon for rounds in range(6)]
    assert one_by_one[0] == 0 and one_by_one == sorted(one_by_one)
    assert one_by_one[5] == pytest.approx(epsilon_after(kind, 5, 1e-5).epsilon, rel=1e-6)


def test_what_samples_a_fixed_number_replaces_a_client_and_moves_the_sum_twice_as_far() -> None:
    everyone = epsilon_after(NoisyRound(2.0, "fixed", 10, 10), 1, 1e-5, "rdp")
    assert everyone.adjacency == "replace_one"
    assert everyone.epsilon == pytest.approx(
        epsilon_after(NoisyRound(1.0, "none", 10, 10), 1, 1e-5, "rdp").epsilon
    )


@pytest.mark.parametrize(
    ("sampling", "accountant"),
    [("poisson", "rdp"), ("none", "pld"), *extended(("poisson", "pld"), ("fixed", "rdp"))],
)
def test_the_noise_for_an_epsilon_spends_it_and_little_less(
    sampling: Sampling, accountant: AccountantName
) -> None:
    kind = NoisyRound(1.0, sampling, 50, 1000)
    noise = find_noise(kind, 20, 1e-5, 4.0, accountant)
    spent = epsilon_after(replace(kind, noise_multiplier=noise), 20, 1e-5, accountant).epsilon
    less = epsilon_after(replace(kind, noise_multiplier=noise - 0.005), 20, 1e-5, accountant).epsilon
    assert spent <= 4.0 < less


def test_a_guarantee_says_what_it_assumes() -> None:
    words = epsilon_after(NoisyRound(1.0, "poisson", 200, 2000), 10, 1e-5).in_words()
    for part in (
        "epsilon 2.8",
        "delta 1e-05",
        "10 rounds",
        "with and without any one client",
        "privacy loss",
        "probability 0.1",
    ):
        assert part in words


def test_the_loss_distribution_of_a_fixed_number_of_clients_is_refused() -> None:
    with pytest.raises(CannotAccount, match='take accountant = "rdp"'):
        epsilon_after(NoisyRound(1.0, "fixed", 10, 100), 1, 1e-5)
    with pytest.raises(CannotAccount, match="cohort is 11 of 10 clients"):
        NoisyRound(1.0, "poisson", 11, 10)


def test_a_plan_tells_epsilon_after_each_round_and_when_the_budget_ends_the_run() -> None:
    sets = [
        "federation.rounds=4",
        "privacy.mechanism=central",
        "privacy.clip_norm=1",
        "privacy.noise_multiplier=2",
    ]
    free = foresee(experiment.load(None, sets), 20)
    expected = [epsilon_after(NoisyRound(2.0, "poisson", 10, 20), n, 1e-5).epsilon for n in range(1, 5)]
    assert free["epsilon"] == pytest.approx(expected) and free["rounds_within_budget"] == 4
    limited = foresee(experiment.load(None, [*sets, f"privacy.budget={expected[1] + 0.01}"]), 20)
    assert limited["rounds_within_budget"] == 2 and "after 2 rounds" in limited["in_words"]
    assert foresee(experiment.load(None), 20) == {}


def test_a_plan_accounts_for_correlated_noise_as_the_run_does() -> None:
    sets = [
        "federation.rounds=4",
        "federation.clients_per_round=5",
        "privacy.mechanism=ftrl",
        "privacy.clip_norm=1",
    ]
    loaded = experiment.load(None, [*sets, "privacy.noise_multiplier=2", "privacy.minimum_separation=2"])
    spent = foresee(loaded, 20)
    expected = CorrelatedSpending(TreeNoise(), 2.0, Participation(4, 2), 1e-5).after(4)
    assert spent["epsilon"][-1] == expected.epsilon and spent["in_words"] == expected.in_words()
    with pytest.raises(UserError, match="is not below one over the number of clients"):
        foresee(
            experiment.load(
                None,
                [
                    *sets[:2],
                    "privacy.mechanism=central",
                    *sets[3:],
                    "privacy.noise_multiplier=2",
                    "privacy.delta=0.1",
                ],
            ),
            20,
        )
