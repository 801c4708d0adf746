"""Differential privacy of a run: its plan, from the table `[privacy]` and the number of clients, and its part of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments.defaults import COHORT
from coordinator.experiments.privacy.correlated import too_few
from coordinator.experiments.privacy.section import Privacy
from coordinator.experiments.schema import Experiment
from coordinator.privacy.accountant import CannotAccount, NoisyRound, Spending, find_noise
from coordinator.privacy.correlated import CorrelatedSpending, find_correlated_noise
from coordinator.privacy.ledger import FileLedger
from coordinator.privacy.participation import make_turns
from coordinator.rounds.plan import RunPlan, generator
from coordinator.rounds.private_round import PrivacyPlan
from strategies.privacy.central import Adaptive, CentralNoise
from strategies.privacy.noise.correlated import BandedNoise, CorrelatedNoise, Participation, TreeNoise
from strategies.privacy.noise.rounds import CorrelatedRounds

OpenLedger = Callable[[CentralNoise], FileLedger]
"""Opens the ledger of a run with this noise."""

_OUTSIDE = (
    "the test losses and accuracies, the number of updates and their training loss in rounds.csv and events.jsonl, which are computed "
    "from clients' rows without noise; keep these files to yourself",
    "choices that somebody makes by these figures, such as of learning rates, of the clipping norm, or of the best of several runs",
)


def with_privacy(run_plan: RunPlan, experiment: Experiment, clients: Sequence[str], folder: Path) -> RunPlan:
    """The plan of a simulation with what its experiment says of privacy. `folder`: gets the ledger, `privacy.json`.

    Raises:
        UserError: delta is too large for so many clients, no noise spends the epsilon, or the ledger is of another mechanism.
    """
    table = experiment.privacy
    if table.mechanism is None:
        return run_plan
    _require_small_delta(table, len(clients))

    def open_ledger(noise: CentralNoise) -> FileLedger:
        mechanism = {
            **{key: value for key, value in table.model_dump(exclude_none=True).items() if key != "budget"},
            "noise_multiplier": noise.noise_multiplier,
            "seed": run_plan.seed,
            "clients": len(clients),
        }
        return FileLedger(folder / "privacy.json", mechanism)

    make_plan = _correlated_plan if table.mechanism == "ftrl" else _independent_plan
    plan = make_plan(run_plan, experiment, clients, open_ledger)
    if not plan.affords(1):
        raise UserError(
            f"privacy.budget = {table.budget:g} does not suffice for one round, which spends epsilon = {plan.epsilon_after(1):.4g}; give "
            "more noise (privacy.noise_multiplier) or a larger budget"
        )
    return replace(run_plan, privacy=plan)


def _independent_plan(
    run_plan: RunPlan, experiment: Experiment, clients: Sequence[str], open_ledger: OpenLedger
) -> PrivacyPlan:
    """Noise that is new in each round."""
    spending = account(experiment, run_plan.closing.wanted, len(clients))
    noise = make_noise(experiment.privacy, spending.kind)
    return PrivacyPlan(
        noise=noise,
        noise_multiplier=noise.noise_multiplier,
        sampling=spending.kind.sampling,
        clients=len(clients),
        guarantee_after=spending.after,
        charge=open_ledger(noise).charge,
        normals=partial(generator, run_plan.seed, "privacy"),
        budget=experiment.privacy.budget,
    )


def _correlated_plan(
    run_plan: RunPlan, experiment: Experiment, clients: Sequence[str], open_ledger: OpenLedger
) -> PrivacyPlan:
    """DP-FTRL: the noise of a round takes back noise of earlier ones, and clients take part in turns (Kairouz 2021, Algorithm 1).

    The standard deviation of z is the noise multiplier times the sensitivity and the clipping norm.
    """
    table, cohort = experiment.privacy, run_plan.closing.wanted
    assert table.clip_norm and table.minimum_separation  # checked
    spending = _account_correlated(experiment, cohort, len(clients))
    noise = CentralNoise(table.clip_norm, spending.round_multiplier, cohort)
    return PrivacyPlan(
        noise=noise,
        noise_multiplier=spending.noise_multiplier,
        sampling="none",
        clients=len(clients),
        guarantee_after=spending.after,
        charge=open_ledger(noise).charge,
        normals=CorrelatedRounds(spending.noise, partial(generator, run_plan.seed, "privacy")).round,
        budget=table.budget,
        turns=make_turns(
            sorted(clients), table.minimum_separation, generator(run_plan.seed, "privacy turns")
        ),
    )


def _account_correlated(experiment: Experiment, cohort: int, clients: int) -> CorrelatedSpending:
    """The account of a resolved experiment with DP-FTRL.

    Raises:
        UserError: too few clients for the separation, or no noise spends the epsilon.
    """
    table = experiment.privacy
    assert table.delta and table.accountant and table.minimum_separation  # resolved
    if problem := too_few(clients, cohort, table.minimum_separation):
        raise UserError(problem)
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


def account(experiment: Experiment, cohort: int, clients: int) -> Spending:
    """The account of a resolved experiment with a mechanism.

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


def _require_small_delta(table: Privacy, clients: int) -> None:
    if table.delta is not None and table.delta >= 1 / clients:
        raise UserError(
            f"privacy.delta = {table.delta:g} is not below one over the number of clients, {1 / clients:g}: publishing one client's rows "
            "whole would be private by it; take a tenth of that or less"
        )


def make_noise(table: Privacy, kind: NoisyRound) -> CentralNoise:
    """The mechanism of a resolved table."""
    assert table.clip_norm  # checked
    adaptive = None
    if table.clipping == "adaptive":
        assert table.clip_quantile and table.clip_learning_rate  # resolved
        adaptive = Adaptive(table.clip_quantile, table.clip_learning_rate)
    return CentralNoise(table.clip_norm, kind.noise_multiplier, kind.cohort, adaptive)


def foresee(experiment: Experiment, clients: int) -> dict[str, Any]:
    """What a simulation of a resolved experiment will spend: epsilon after each round; empty without a mechanism.

    Raises:
        UserError: as `with_privacy`.
    """
    table, rounds = experiment.privacy, experiment.federation.rounds
    if table.mechanism is None:
        return {}
    cohort = experiment.federation.clients_per_round or min(COHORT, clients)
    _require_small_delta(table, clients)
    find = _account_correlated if table.mechanism == "ftrl" else account
    spending = find(experiment, cohort, clients)
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
    privacy, table = run_plan.privacy, experiment.privacy
    if privacy is None:
        return {}
    guarantee = privacy.guarantee_after(rounds)
    return {
        "mechanism": table.mechanism,
        "clipping": table.clipping,
        "noise_multiplier": privacy.noise_multiplier,
        "sum_noise_multiplier": privacy.noise.sum_multiplier,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "accountant": guarantee.accountant,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "budget": privacy.budget,
        "ended_by_budget": rounds < run_plan.rounds and not privacy.affords(rounds + 1),
        "in_words": guarantee.in_words(),
        "outside": list(_outside(experiment)),
    }


def _outside(experiment: Experiment) -> Sequence[str]:
    """What the guarantee does not cover, in words."""
    found = [
        "the coordinator, which sees each update before it is summed and must be trusted with it",
        "whoever knows the seed: the noise and the cohorts of a simulation follow from it",
        *_OUTSIDE,
    ]
    if experiment.simulation.fine_tune is not None or experiment.simulation.local_baseline != "off":
        found.append("models that single clients train, and their figures")
    if experiment.model.init is not None:
        found.append("the rows from which model.init was trained")
    if experiment.data.scale == "federated" or experiment.data.categories is not None:
        found.append(
            "the scale and the categories of the table, which are statistics of all rows without noise"
        )
    return found
