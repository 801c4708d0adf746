"""A statistics round on devices, as a run of its own, for `fedloop statistics`.

    1. ask for counts, means and bounds
    2. from all bounds, agree on the bins of the histograms, and ask for these
    3. the report, from the rows of both

Every answer is a row before the device gets its acknowledgement, so a restarted coordinator continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.db import answers, devices, events
from coordinator.db import runs as rows
from coordinator.document_checks import to_user_error, validate
from coordinator.errors import UserError
from coordinator.experiments.defaults import minimum_count, with_defaults
from coordinator.experiments.experiment import apply_settings
from coordinator.experiments.schema import Experiment
from coordinator.fleets.statistics import REQUESTED, Patience, StatisticsFleet
from coordinator.reports import statistics as report
from coordinator.reports import statistics_schema
from coordinator.scheduling.deployments import Deployment
from edge_client.data.statistics import bin_edges, pooled
from edge_client.wire.device import ModelRef
from edge_client.wire.schema import DataSchema
from edge_client.wire.statistics import StatisticsRequest, StatisticsResult

MIN_SITES = 2
"""Fewer devices give no pool to compare with, and a mean that is one device's own."""

_SUMS, _HISTOGRAMS = 0, 1
"""Numbers of the two rounds."""

_NO_MODEL = ModelRef("", {}, (), 0, "float32", "classification")


def resolve(document: Mapping[str, Any], sets: tuple[str, ...] = ()) -> Experiment:
    """The experiment, of which statistics use `data.dataset`, `data.features` and `[devices]`; rows need no description.

    Raises:
        UserError: listing all bad keys.
    """
    experiment, problems = validate(Experiment, apply_settings(dict(document), sets), lambda _: (), {})
    if experiment is None or problems:
        raise to_user_error("experiment", problems)
    return with_defaults(experiment, "devices")


def deployment_of(run: str, experiment: Experiment, project: str) -> Deployment:
    """What decides which devices get a request."""
    return Deployment(
        run=run,
        run_name=experiment.name,
        dataset=experiment.data.dataset,
        model=_NO_MODEL,
        runtimes=(),
        selection=experiment.devices.selection,
        kind="statistics",
        project=project,
    )


def run_statistics(services: Services, run: str, experiment: Experiment, fleet: StatisticsFleet) -> None:
    """Both rounds of a statistics run, and its end.

    Raises:
        UserError: too few devices reported anything.
        Stopped: the run was cancelled, or the process is ending.
    """
    services.database.write(partial(rows.set_running, run=run)).result()
    request, patience = _request(experiment), _patience(experiment)
    reported = _require_enough(fleet.ask(_SUMS, request, patience))
    edges = bin_edges(pooled(reported.values()), report.BINS)
    if edges:
        fleet.ask(_HISTOGRAMS, replace(request, edges=edges), patience)
    ended = services.database.write(
        partial(rows.end, run=run, state="finished", now=services.clock())
    ).result()
    services.signals.notify("events", *(f"device:{device}" for device in ended or ()))


def read_report(connection: Connection, run: str) -> dict[str, Any]:
    """The report of what was reported so far. Devices of one site are one; others go by their names."""
    reported = answers.statistics_of(connection, run, _SUMS) | answers.statistics_of(
        connection, run, _HISTOGRAMS
    )
    silent = answers.unanswered(connection, run, _SUMS, "statistics")
    data = Experiment.model_validate(rows.require(connection, run).experiment).data
    silent = _not_asked(connection, run) | silent
    names = devices.names(connection, reported.keys() | silent.keys())
    sites: dict[str, list[StatisticsResult]] = {}
    for device, result in reported.items():
        sites.setdefault(result.site or names[device], []).append(result)
    return report.make_report(
        {name: pooled(results) if len(results) > 1 else results[0] for name, results in sites.items()},
        {names[device]: words for device, words in silent.items() if device not in reported},
        quantity=data.label if data.task == "regression" else "",
    )


def make_schema(connection: Connection, run: str) -> tuple[DataSchema, list[str]]:
    """The data schema that the devices' tables have in common, by their statistics; and notices.

    Raises:
        UserError: `no_schema`: the devices contradict each other; each is named.
    """
    experiment = Experiment.model_validate(rows.require(connection, run).experiment)
    results = answers.statistics_of(connection, run, _SUMS)
    names = devices.names(connection, results.keys())
    by_name = {names[device]: result for device, result in results.items()}
    return statistics_schema.make_schema(experiment.data, by_name, experiment.federation.weight_cap)


def _not_asked(connection: Connection, run: str) -> dict[str, str]:
    """Device -> why it got no request, of those that the event of the first round names."""
    requested = events.first(connection, run, REQUESTED)
    blocked = requested._mapping["values"]["blocked"] if requested is not None else ()
    return {each["device"]: f"it was not asked: {'; '.join(each['reasons'])}" for each in blocked}


def _request(experiment: Experiment) -> StatisticsRequest:
    data = experiment.data
    return StatisticsRequest(
        minimum_count(data),
        tuple(data.features or ()),
        label=data.label,
        exclude=statistics_schema.not_inputs(data),
        quantity=data.task == "regression",
    )


def _patience(experiment: Experiment) -> Patience:
    wanted = experiment.devices
    return Patience(MIN_SITES, wanted.patience_seconds, wanted.evaluate_seconds)


def _require_enough(reported: Mapping[str, StatisticsResult]) -> Mapping[str, StatisticsResult]:
    """What devices reported, without those that have too few rows. Raises: UserError: too few are left."""
    useful = {device: result for device, result in reported.items() if result.rows}
    if len(useful) < MIN_SITES:
        raise UserError(
            f"{len(useful)} of {len(reported)} devices that answered have statistics to report, {MIN_SITES} are needed; why a device has none: "
            "`[statistics]` of its configuration, fewer training rows than its minimum count, or fedloop-edge status"
        )
    return useful
