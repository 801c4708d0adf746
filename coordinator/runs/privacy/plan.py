"""Differential privacy of a run: its plan, from the table `[privacy]` and the number of clients, and its part of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments.defaults import COHORT
from coordinator.experiments.privacy.correlated import too_few
from coordinator.experiments.privacy.section import BY_CLIENTS, Privacy
from coordinator.experiments.schema import Experiment
from coordinator.privacy.accountant import CannotAccount, NoisyRound, Spending, find_noise
from coordinator.privacy.correlated import CorrelatedSpending, find_correlated_noise
from coordinator.privacy.ledger import FileLedger
from coordinator.privacy.mechanism import Mechanism
from coordinator.privacy.participation import make_turns
from coordinator.reports.privacy.description import describe_guarantee, outside
from coordinator.rounds.plan import RunPlan, cohort_size, generator
from coordinator.rounds.private_round import PrivacyPlan
from coordinator.runs.privacy import by_clients
from coordinator.runs.privacy.by_clients import UNKNOWN, Sizes, SpendingByClients
from strategies.privacy.central import Adaptive, CentralNoise
from strategies.privacy.clients import ClientNoise
from strategies.privacy.noise.additive import FloatNoise, NoiseSource, Normals
from strategies.privacy.noise.correlated import BandedNoise, CorrelatedNoise, Participation, TreeNoise
from strategies.privacy.noise.rounds import CorrelatedRounds


def with_privacy(
    run_plan: RunPlan, experiment: Experiment, clients: Sequence[str], sizes: Sizes, folder: Path
) -> RunPlan:
    """The plan of a simulation with what its experiment says of privacy.

    `sizes`: of updates and clients. `folder`: gets the ledger, `privacy.json`.

    Raises:
        UserError: delta is too large for so many clients, no noise spends the epsilon, or the ledger is of another mechanism.
    """
    table = experiment.privacy
    if table.mechanism is None:
        return run_plan
    if table.mechanism != "example":  # which is about rows
        require_small_delta(table, len(clients))

    cohort = run_plan.closing.wanted
    separation = table.minimum_separation
    if separation and (problem := too_few(len(clients), cohort_size(run_plan), separation)):
        raise UserError(problem)
    spending: Spending | CorrelatedSpending | SpendingByClients
    noise: CentralNoise | ClientNoise
    if table.mechanism in BY_CLIENTS:
        spending = by_clients.account(experiment, cohort_size(run_plan), sizes)
        noise = by_clients.client_noise(table, spending, cohort, sizes.values)
    else:
        spending = account(experiment, cohort, len(clients))
        noise = make_noise(table, spending, cohort)
    mechanism = {
        **{key: value for key, value in table.model_dump(exclude_none=True).items() if key != "budget"},
        "noise_multiplier": noise.noise_multiplier,
        "seed": run_plan.seed,
        "clients": len(clients),
    }
    plan = PrivacyPlan(
        noise=noise,
        noise_multiplier=spending.noise_multiplier,
        sampling=table.sampling or "none",
        clients=len(clients),
        guarantee_after=spending.after,
        ledger=FileLedger(folder / "privacy.json", mechanism),
        source=_seeded_source(spending, run_plan.seed),
        uniforms=lambda number, count: generator(run_plan.seed, "cohort", number).random(count),
        budget=table.budget,
        turns=None
        if separation is None
        else make_turns(sorted(clients), separation, generator(run_plan.seed, "privacy turns")),
    )
    require_affordable(plan.epsilon_after(1), table)
    return replace(run_plan, privacy=plan)


def plan_mechanism(experiment: Experiment, cohort: int, enrolled: int, sizes: Sizes) -> Mechanism:
    """The mechanism of a run on devices that has no ledger yet. `experiment`: resolved, with a mechanism. `enrolled`: devices of the project.

    Raises:
        UserError: delta is too large for the enrolled devices, or no noise spends the epsilon.
    """
    table = experiment.privacy
    if table.mechanism != "example":  # which is about rows
        require_small_delta(table, max(enrolled, cohort))
    if table.mechanism in BY_CLIENTS:
        return by_clients.make_mechanism(experiment, cohort, sizes)
    assert table.sampling and table.delta and table.accountant  # resolved
    clients = max(experiment.federation.clients or cohort, cohort)
    spending = account(experiment, cohort, clients)
    is_correlated = isinstance(spending, CorrelatedSpending)
    return Mechanism(
        noise_multiplier=spending.noise_multiplier,
        sampling=table.sampling,
        cohort=cohort,
        clients=clients,
        rounds=experiment.federation.rounds,
        delta=table.delta,
        accountant=table.accountant,
        minimum_separation=(table.minimum_separation or 1) if is_correlated else 0,
        bands=(table.bands or 1) if is_correlated and table.noise != "tree" else 0,
    )


def require_affordable(epsilon: float, table: Privacy) -> None:
    """Refuses a budget that does not suffice for one round. `epsilon`: that the first round spends."""
    if table.budget is not None and epsilon > table.budget:
        raise UserError(
            f"privacy.budget = {table.budget:g} does not suffice for one round, which spends epsilon = {epsilon:.4g}; give "
            "more noise (privacy.noise_multiplier) or a larger budget"
        )


def _seeded_source(
    spending: Spending | CorrelatedSpending | SpendingByClients, seed: int
) -> Callable[[int], NoiseSource]:
    """The noise of each round, the same whenever it is asked for. Under DP-FTRL a round takes back noise of earlier ones (Kairouz 2021,
    Algorithm 1)."""
    seeded = partial(generator, seed, "privacy")
    normals: Callable[[int], Normals] = seeded
    if isinstance(spending, CorrelatedSpending):
        normals = CorrelatedRounds(spending.noise, seeded).round
    return lambda number: FloatNoise(normals(number))


def account(experiment: Experiment, cohort: int, clients: int) -> Spending | CorrelatedSpending:
    """The account of a resolved experiment with a mechanism.

    Raises:
        UserError: no noise spends the epsilon.
    """
    if experiment.privacy.mechanism == "ftrl":
        return _account_correlated(experiment)
    return account_independent(experiment, cohort, clients)


def _account_correlated(experiment: Experiment) -> CorrelatedSpending:
    table = experiment.privacy
    assert table.delta and table.accountant and table.minimum_separation  # resolved
    multiplier = table.noise_multiplier
    if multiplier is None:
        assert table.epsilon  # or a noise multiplier
        try:
            multiplier = find_correlated_noise(table.delta, table.epsilon, table.accountant)
        except CannotAccount as error:
            raise UserError(f"privacy.epsilon = {table.epsilon:g}: {error}") from None
    noise: CorrelatedNoise = TreeNoise() if table.noise == "tree" else BandedNoise(table.bands or 1)
    participation = Participation(experiment.federation.rounds, table.minimum_separation)
    return CorrelatedSpending(noise, multiplier, participation, table.delta, table.accountant)


def account_independent(experiment: Experiment, cohort: int, clients: int) -> Spending:
    """The account of a resolved experiment whose noise is new in each round.

    Raises:
        UserError: as `with_privacy`.
    """
    table = experiment.privacy
    assert table.sampling and table.delta and table.accountant  # resolved
    kind = NoisyRound(table.noise_multiplier or 1.0, table.sampling, cohort, clients)
    if table.noise_multiplier is None:
        assert table.epsilon  # or a noise multiplier
        try:
            found = find_noise(
                kind, experiment.federation.rounds, table.delta, table.epsilon, table.accountant
            )
        except CannotAccount as error:
            raise UserError(f"privacy.epsilon = {table.epsilon:g}: {error}") from None
        kind = replace(kind, noise_multiplier=found)
    return Spending(kind, table.delta, table.accountant)


def require_small_delta(table: Privacy, clients: int) -> None:
    """Refuses a delta that would allow to publish one client.

    Raises:
        UserError: it is not below one over the number of clients.
    """
    if table.delta is not None and table.delta >= 1 / clients:
        raise UserError(
            f"privacy.delta = {table.delta:g} is not below one over the number of clients, {1 / clients:g}: publishing one client's rows "
            "whole would be private by it; take a tenth of that or less"
        )


def noise_of(experiment: Experiment, mechanism: Mechanism, cohort: int) -> CentralNoise | ClientNoise:
    """The noise of a run on devices, for rounds of so many."""
    spending = mechanism.spending()
    if isinstance(spending, Spending | CorrelatedSpending):
        return make_noise(experiment.privacy, spending, cohort)
    values = 0 if mechanism.in_ring is None else mechanism.in_ring.values
    return by_clients.client_noise(experiment.privacy, spending, cohort, values)


def make_noise(table: Privacy, spending: Spending | CorrelatedSpending, cohort: int) -> CentralNoise:
    """The mechanism of a resolved table. Of DP-FTRL the standard deviation of z is the noise multiplier times the sensitivity and the
    clipping norm."""
    assert table.clip_norm  # checked
    if isinstance(spending, CorrelatedSpending):
        return CentralNoise(table.clip_norm, spending.round_multiplier, cohort)
    adaptive = None
    if table.clipping == "adaptive":
        assert table.clip_quantile and table.clip_learning_rate  # resolved
        adaptive = Adaptive(table.clip_quantile, table.clip_learning_rate)
    return CentralNoise(table.clip_norm, spending.noise_multiplier, cohort, adaptive)


def foresee(experiment: Experiment, clients: int, sizes: Sizes = UNKNOWN) -> dict[str, Any]:
    """What a simulation of a resolved experiment will spend: epsilon after each round; empty without a mechanism.

    `sizes`: of updates and clients, if clients add the noise.

    Raises:
        UserError: as `with_privacy`.
    """
    table, rounds = experiment.privacy, experiment.federation.rounds
    if table.mechanism is None:
        return {}
    cohort = experiment.federation.clients_per_round or min(COHORT, clients)
    if table.mechanism != "example":
        require_small_delta(table, clients)
    if table.minimum_separation and (problem := too_few(clients, cohort, table.minimum_separation)):
        raise UserError(problem)
    spending: Spending | CorrelatedSpending | SpendingByClients
    if table.mechanism in BY_CLIENTS:
        selected = math.ceil(cohort * experiment.federation.over_select)
        spending = by_clients.account(experiment, selected, sizes)
    else:
        spending = account(experiment, cohort, clients)
    guarantees = [spending.after(number) for number in range(1, rounds + 1)]
    within = [each for each in guarantees if table.budget is None or each.epsilon <= table.budget]
    return {
        "noise_multiplier": spending.noise_multiplier,
        "epsilon": [each.epsilon for each in guarantees],
        "delta": spending.delta,
        "budget": table.budget,
        "rounds_within_budget": len(within),
        "in_words": within[-1].in_words()
        if within
        else f"one round would spend epsilon = {guarantees[0].epsilon:.4g}",
    }


def describe(experiment: Experiment, run_plan: RunPlan, rounds: int) -> Mapping[str, Any]:
    """What a report says of privacy after so many rounds; nothing of a run without it."""
    privacy = run_plan.privacy
    if privacy is None:
        return {}
    document = experiment.model_dump(mode="json", exclude_none=True)
    ended = rounds < run_plan.rounds and not privacy.affords(rounds + 1)
    noise = privacy.noise
    of_noise = (
        {"sum_noise_multiplier": noise.sum_multiplier}
        if isinstance(noise, CentralNoise)
        else {"sizes": {"values": noise.values, "rows": list(noise.rows)}}
    )
    return {
        **describe_guarantee(document, privacy.guarantee_after(rounds), privacy.noise_multiplier),
        **of_noise,
        "ended_by_budget": ended,
        "outside": outside(document, "simulated"),
    }
