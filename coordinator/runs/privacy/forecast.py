"""What a run on devices will spend of its privacy, and what secure aggregation will hide in it, before it begins. Runs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.context.services import Services
from coordinator.experiments.defaults import COHORT
from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.schema import Experiment
from coordinator.privacy.accountant import Guarantee
from coordinator.privacy.mechanism import Mechanism, rounds_within
from coordinator.reports.privacy.description import assumptions, outside
from coordinator.runs.privacy.by_clients import Sizes
from coordinator.runs.privacy.earlier import EarlierRuns, compose_with_earlier, count_enrolled, declared_rows
from coordinator.runs.privacy.plan import noise_of, plan_mechanism, require_affordable
from strategies import presets

POINTS = 25
"""Rounds of which a forecast tells the epsilon."""
CEILING = 100.0
"""Epsilon beyond which none is computed: it promises next to nothing, and takes long."""


@dataclass(frozen=True)
class EpsilonAfter:
    """The epsilon that so many rounds spend together."""

    rounds: int
    epsilon: float


@dataclass(frozen=True)
class Forecast:
    """What a run will spend.

    Attributes:
        mean_deviation: standard deviation of the noise in each value of the first round's mean update. None: rounds take noise back
            from each other, or noise is in gradients.
        spent: after at most `POINTS` rounds in equal steps, none of them behind the first one beyond `CEILING`.
        rounds_within_budget: of those planned. None: the budget is beyond `CEILING`.
        guarantee: of all rounds within the budget, or of those in `spent`.
        earlier: the runs before it on the same data set, composed with all of its rounds.
    """

    mechanism: Mechanism
    budget: float | None
    mean_deviation: float | None
    spent: Sequence[EpsilonAfter]
    rounds_within_budget: int | None
    guarantee: Guarantee
    assumptions: Sequence[str]
    outside: Sequence[str]
    earlier: EarlierRuns | None


def foresee(experiment: Experiment, services: Services, project: str) -> Forecast | None:
    """What a run on the project's devices will spend; None without a mechanism. `experiment`: resolved, without problems.

    Raises:
        UserError: the run would be refused: delta is too large for the enrolled devices, no noise spends the epsilon, or the budget does not
            suffice for one round.
        SizesUnknown: what the noise depends on is known later.
    """
    table, cohort = experiment.privacy, cohort_of(experiment)
    if table.mechanism is None:
        return None
    sizes = Sizes(rows=declared_rows(services, project, experiment.data.dataset))
    mechanism = plan_mechanism(experiment, cohort, count_enrolled(services, project), sizes)
    spending = mechanism.spending()
    require_affordable(spending.after(1).epsilon, table)
    spent = _spent(mechanism)
    within = _within(mechanism, table.budget, spent)
    last = spent[-1].rounds if within is None else min(within, spent[-1].rounds)
    document = experiment.model_dump(mode="json", exclude_none=True)
    is_whole = spent[-1].epsilon <= CEILING
    return Forecast(
        mechanism=mechanism,
        budget=table.budget,
        mean_deviation=_mean_deviation(experiment, mechanism, cohort),
        spent=spent,
        rounds_within_budget=within,
        guarantee=spending.after(last),
        assumptions=assumptions(mechanism),
        outside=outside(document, "devices"),
        earlier=compose_with_earlier(mechanism, experiment.data.dataset, services, project)
        if is_whole
        else None,
    )


def foresee_secure_aggregation(experiment: Experiment) -> str | None:
    """What secure aggregation will hide and what not, in words; None where it is off. `experiment`: as above."""
    if not experiment.privacy.secure_aggregation:
        return None
    strategy = presets.get(experiment.strategy.name, **experiment.strategy.options)
    words: str = secure_aggregation.describe(experiment.privacy, cohort_of(experiment), strategy)["in_words"]
    return words


def cohort_of(experiment: Experiment) -> int:
    """Devices that a round on devices waits for."""
    return experiment.federation.clients_per_round or COHORT


def _mean_deviation(experiment: Experiment, mechanism: Mechanism, cohort: int) -> float | None:
    if mechanism.is_correlated or mechanism.by_devices == "example":
        return None
    noise = noise_of(experiment, mechanism, cohort)
    # Where devices add the noise each brings its own.
    added = math.sqrt(cohort) if mechanism.by_devices == "local" else 1.0
    return noise.sum_multiplier * noise.clip_norm * added / cohort


def _spent(mechanism: Mechanism) -> list[EpsilonAfter]:
    spending, rounds = mechanism.spending(), mechanism.rounds
    steps = max(1, min(POINTS, rounds) - 1)
    found: list[EpsilonAfter] = []
    for number in sorted({1 + (step * (rounds - 1)) // steps for step in range(steps + 1)}):
        found.append(EpsilonAfter(number, spending.after(number).epsilon))
        if found[-1].epsilon > CEILING:
            break
    return found


def _within(mechanism: Mechanism, budget: float | None, spent: Sequence[EpsilonAfter]) -> int | None:
    last = spent[-1]
    if budget is None or (last.rounds == mechanism.rounds and last.epsilon <= budget):
        return mechanism.rounds
    return None if budget > CEILING else rounds_within(mechanism, budget)
