"""Operator API: what a run would spend of its privacy, and what it would hide, before it begins."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from coordinator.api.deps import ServicesDep
from coordinator.api.experiments import ExperimentProblem, ExperimentRequest, check, show_problems
from coordinator.db.project_filter import NOBODY
from coordinator.errors import UserError
from coordinator.privacy.accountant import AccountantName, Adjacency, Sampling
from coordinator.runs.privacy import forecast
from coordinator.runs.privacy.devices import EarlierRuns
from coordinator.runs.privacy.forecast import CEILING, POINTS, EpsilonAfter, Forecast

router = APIRouter(prefix="/experiments", tags=["experiments"])


class PrivacyForecast(BaseModel):
    """What a run would spend."""

    noise_multiplier: float
    mean_deviation: float | None = Field(
        description="Standard deviation of the noise in each value of the first round's mean update; null: rounds take noise back from each other."
    )
    delta: float
    accountant: AccountantName
    adjacency: Adjacency
    sampling: Sampling
    budget: float | None = Field(description="Epsilon beyond which no round begins; null: there is no limit.")
    cohort: int = Field(description="Devices that a round waits for; under Poisson sampling on average.")
    clients: int = Field(description="Of which they are drawn, under Poisson sampling.")
    rounds: int
    rounds_within_budget: int | None = Field(
        description=f"Of those planned; null: the budget is beyond {CEILING:g}, up to which epsilons are computed."
    )
    spent: list[EpsilonAfter] = Field(
        description=f"Epsilon after at most {POINTS} rounds in equal steps, as far as it is {CEILING:g} at most, and the first one beyond."
    )
    in_words: str = Field(description="The guarantee of all rounds within the budget, in a sentence.")
    assumptions: list[str] = Field(description="What epsilon supposes, in words.")
    outside: list[str] = Field(description="What the guarantee does not cover, in words.")
    earlier: EarlierRuns | None = Field(
        description="What earlier runs on the same data set may have spent of a device, and together with all rounds of this one; null: "
        "nothing, or that of this run is not computed."
    )


class PrivacyOutlook(BaseModel):
    """`problems`: why a run would be refused for its table `[privacy]`, each with its key; then there is no forecast."""

    problems: list[ExperimentProblem]
    forecast: PrivacyForecast | None = Field(description="Null without differential privacy.")
    secure_aggregation: str | None = Field(
        description="What it hides and what not, in words; null where it is off."
    )


@router.post("/privacy")
def foresee_privacy(request: ExperimentRequest, services: ServicesDep) -> PrivacyOutlook:
    """What a run of an experiment would spend of its privacy, round by round, or why it would be refused; starts nothing."""
    try:
        checked = check(request, services)
    except UserError:
        return _refused()  # it has no such table; `POST /experiments/check` says why
    try:
        experiment = checked.experiment
        problems = [each for each in checked.problems if "privacy." in each]
        if experiment is None or problems:
            return _refused(*problems)
        foreseen = forecast.foresee(experiment, services, services.project or NOBODY)
        hidden = None if checked.problems else forecast.foresee_secure_aggregation(experiment)
    except UserError as error:
        return _refused(str(error))
    shown = None if foreseen is None else _show(foreseen)
    return PrivacyOutlook(problems=[], forecast=shown, secure_aggregation=hidden)


def _refused(*problems: str) -> PrivacyOutlook:
    return PrivacyOutlook(problems=show_problems(problems), forecast=None, secure_aggregation=None)


def _show(foreseen: Forecast) -> PrivacyForecast:
    mechanism, guarantee = foreseen.mechanism, foreseen.guarantee
    return PrivacyForecast(
        noise_multiplier=mechanism.noise_multiplier,
        mean_deviation=foreseen.mean_deviation,
        delta=mechanism.delta,
        accountant=guarantee.accountant,
        adjacency=guarantee.adjacency,
        sampling=guarantee.sampling,
        budget=foreseen.budget,
        cohort=mechanism.cohort,
        clients=mechanism.clients,
        rounds=mechanism.rounds,
        rounds_within_budget=foreseen.rounds_within_budget,
        spent=list(foreseen.spent),
        in_words=guarantee.in_words(),
        assumptions=list(foreseen.assumptions),
        outside=list(foreseen.outside),
        earlier=foreseen.earlier,
    )
