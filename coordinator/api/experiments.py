"""Operator API: experiments before they run. Their schema, for forms; a check that says everything that is wrong at once; and what a run would
spend of its privacy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from coordinator.api.deps import RequestBody, ServicesDep
from coordinator.context.services import Services
from coordinator.db import participants
from coordinator.db import runs as rows
from coordinator.db.project_filter import NOBODY
from coordinator.document_checks import key_of
from coordinator.errors import UserError
from coordinator.experiments import form
from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.schema import Experiment
from coordinator.experiments.validation import dataset_name_problem
from coordinator.privacy.accountant import AccountantName, Adjacency, Sampling
from coordinator.runs import admission
from coordinator.runs.privacy import forecast
from coordinator.runs.privacy.by_clients import SizesUnknown
from coordinator.runs.privacy.earlier import EarlierRuns
from coordinator.runs.privacy.forecast import CEILING, POINTS, EpsilonAfter, Forecast
from coordinator.scheduling import matching
from coordinator.scheduling.deployments import Deployment
from coordinator.toml_files import parse_toml
from edge_client.wire.device import BlobRef, ModelRef

router = APIRouter(prefix="/experiments", tags=["experiments"])

SHOWN_DEVICES = 20
"""Names of devices in a preview."""
_PAGE = 1000
_UNTIL_PREPARED = BlobRef("", 0)
"""For the artifact and the schema, which a run makes when it is prepared; matching asks only whether there are any."""


class ExperimentSchema(BaseModel):
    """`experiment`: JSON Schema of the file; `models`, `strategies`: by name, that of their options; `datasets`: known names."""

    experiment: dict[str, Any]
    models: dict[str, dict[str, Any]]
    strategies: dict[str, dict[str, Any]]
    datasets: list[str]


class ExperimentRequest(RequestBody):
    """An experiment as for `POST /runs`."""

    experiment: str | dict[str, Any] = Field({}, description="TOML text, or the same document in JSON.")
    sets: list[str] = Field([], max_length=1000)
    run: str | None = Field(None, description="Instead of `experiment`: what this earlier run ran with.")


class CheckRequest(ExperimentRequest):
    """An experiment as for `POST /runs`, and what to say of it."""

    preview: bool = Field(False, description="Also which devices would take part, and the data.")


class ExperimentProblem(BaseModel):
    """`key`: dotted, as in the file; empty if the problem is of the whole text."""

    key: str
    message: str


class Exclusion(BaseModel):
    """A reason that excludes devices: how many, and the first one with its own words."""

    code: str
    devices: int
    example: str


class Preview(BaseModel):
    """Who would take part now, and in what data. `rows`: training rows of the devices that match, as they report them."""

    dataset: str
    scored_by_coordinator: bool = Field(description="It has rows of its own to score every round on.")
    described: dict[str, Any] | None = Field(
        description="Rows that only devices hold: shape, classes, columns."
    )
    enrolled: int
    matching: int
    rows: int
    names: list[str] = Field(description=f"The first {SHOWN_DEVICES} that match.")
    excluded: list[Exclusion]


class CheckedExperiment(BaseModel):
    """`values`: the text of every key as written, for `sets`; `resolved`: of every key with defaults, empty if a key is invalid."""

    problems: list[ExperimentProblem]
    notices: list[str]
    values: dict[str, str]
    resolved: dict[str, str]
    preview: Preview | None


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
    forecast: PrivacyForecast | None = Field(
        description="Null without differential privacy, or if `unknown` says why."
    )
    unknown: str | None = Field(
        default=None, description="Why what a run would spend is known later only; null: it is known."
    )
    secure_aggregation: str | None = Field(
        description="What it hides and what not, in words; null where it is off."
    )


@router.get("/schema")
def get_experiment_schema() -> ExperimentSchema:
    """What an experiment file may contain."""
    return ExperimentSchema(
        experiment=form.experiment_schema(),
        models=form.model_schemas(),
        strategies=form.strategy_schemas(),
        datasets=list(form.dataset_names()),
    )


@router.post("/check")
def check_experiment(request: CheckRequest, services: ServicesDep) -> CheckedExperiment:
    """Every problem of an experiment, each with its key; starts nothing."""
    try:
        checked = _check(request, services)
    except UserError as error:
        whole = ExperimentProblem(key="", message=form.encodable(str(error)))
        return CheckedExperiment(problems=[whole], notices=[], values={}, resolved={}, preview=None)
    experiment = checked.experiment
    preview = None if experiment is None or not request.preview else _preview(services, experiment)
    return CheckedExperiment(
        problems=_show_problems(checked.problems),
        notices=checked.notices,
        values=form.to_texts(checked.document),
        resolved={} if experiment is None else form.to_texts(_dump(experiment)),
        preview=preview,
    )


@router.post("/privacy")
def foresee_privacy(request: ExperimentRequest, services: ServicesDep) -> PrivacyOutlook:
    """What a run of an experiment would spend of its privacy, round by round, or why it would be refused; starts nothing."""
    try:
        checked = _check(request, services)
    except UserError:
        return _refuse_privacy()  # it has no such table; `POST /experiments/check` says why
    try:
        experiment = checked.experiment
        problems = [each for each in checked.problems if "privacy." in each]
        if experiment is None or problems:
            return _refuse_privacy(*problems)
        foreseen = _foresee(experiment, services)
        hidden = None if checked.problems else forecast.foresee_secure_aggregation(experiment)
    except UserError as error:
        return _refuse_privacy(str(error))
    shown = _show_forecast(foreseen) if isinstance(foreseen, Forecast) else None
    unknown = foreseen if isinstance(foreseen, str) else None
    return PrivacyOutlook(problems=[], forecast=shown, unknown=unknown, secure_aggregation=hidden)


def _foresee(experiment: Experiment, services: Services) -> Forecast | str | None:
    """What a run would spend, or why that is known later; None: it has no differential privacy."""
    try:
        return forecast.foresee(experiment, services, services.project or NOBODY)
    except SizesUnknown as unknown:
        return str(unknown)


def _refuse_privacy(*problems: str) -> PrivacyOutlook:
    return PrivacyOutlook(problems=_show_problems(problems), forecast=None, secure_aggregation=None)


def _show_forecast(foreseen: Forecast) -> PrivacyForecast:
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


def _check(request: ExperimentRequest, services: Services) -> admission.Checked:
    """The experiment of a request, checked. Raises: UserError: it is no TOML, or a setting is none."""
    document = request.experiment
    if request.run is not None:
        document = services.database.read(partial(rows.require, run=request.run)).experiment
    elif isinstance(document, str):
        document = parse_toml(document, "experiment")
    return admission.check(document, request.sets, services)


def _show_problems(messages: Iterable[str]) -> list[ExperimentProblem]:
    """Each problem with its key."""
    return [ExperimentProblem(key=key_of(each), message=each) for each in map(form.encodable, messages)]


def _dump(experiment: Experiment) -> dict[str, Any]:
    return experiment.model_dump(mode="json", exclude_none=True)


def _preview(services: Services, experiment: Experiment) -> Preview:
    project = services.project or NOBODY
    deployment, now = _would_deploy(experiment, project), services.clock()
    excluded: dict[str, Exclusion] = {}
    counts, names = Counter[str](), list[str]()

    def read(connection: Connection) -> None:
        after = ""
        while page := participants.enrolled(connection, _PAGE, after, project=project):
            after = page[-1].id
            for device in page:
                counts["enrolled"] += 1
                reasons = matching.blocking_reasons(device, deployment, now)
                for reason in reasons:
                    example = f"{device.name}: {reason.message}"
                    seen = excluded.setdefault(
                        reason.code, Exclusion(code=reason.code, devices=0, example=example)
                    )
                    seen.devices += 1
                if not reasons and device.report is not None:
                    counts["matching"] += 1
                    counts["rows"] += device.report.datasets.get(deployment.dataset, 0)
                    if len(names) < SHOWN_DEVICES:
                        names.append(device.name)

    services.database.read(read)
    data = experiment.data
    return Preview(
        dataset=data.dataset,
        scored_by_coordinator=dataset_name_problem(data.loaded_as) is None,
        described=_described(experiment),
        enrolled=counts["enrolled"],
        matching=counts["matching"],
        rows=counts["rows"],
        names=names,
        excluded=sorted(excluded.values(), key=lambda each: -each.devices),
    )


def _described(experiment: Experiment) -> dict[str, Any] | None:
    data = experiment.data
    if not data.is_described:
        return None
    schema = data.read_schema()
    columns = {} if schema is None else {"columns": [each.name for each in schema.columns]}
    return {**data.described_shape, **columns}


def _would_deploy(experiment: Experiment, project: str) -> Deployment:
    """The deployment that a run of this experiment would have."""
    model, data = experiment.model, experiment.data
    reads_table = data.data_schema is not None or data.loaded_as == "csv"
    return Deployment(
        run="",
        run_name=experiment.name,
        dataset=data.dataset,
        model=ModelRef(model.name or "", model.options, (), 0, "float32", "classification"),
        runtimes=tuple(experiment.federation.runtimes),
        artifact=_UNTIL_PREPARED,
        manifest=_UNTIL_PREPARED,
        schema=_UNTIL_PREPARED if reads_table else None,
        changes_steps=experiment.local.changes_steps,
        has_code=experiment.uplink.code is not None,
        changes_updates=experiment.privacy.changes_updates_on_devices,
        secure=secure_aggregation.make_sums(experiment.privacy, experiment.seed),
        selection=experiment.devices.selection,
        quorum=experiment.federation.min_updates,
        project=project,
    )
