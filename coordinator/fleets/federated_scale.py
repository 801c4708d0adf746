"""Numbers of a run on devices, scaled by the mean and deviation over all of them (`data.scale = "federated"`).

The coordinator reads its own table first, and with it the columns. Before round 1 it asks the devices that match the run for
statistics. Their pooled means and deviations replace those of its own table: in the data schema that devices train by, and in
its own held-out rows, which are read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from coordinator.context.services import Services
from coordinator.db import devices
from coordinator.experiments.defaults import COHORT, minimum_count
from coordinator.experiments.schema import Experiment
from coordinator.fleets.robust_scale import scale_of
from coordinator.fleets.statistics import Patience, StatisticsFleet
from coordinator.scheduling.deployments import Deployment
from edge_client.data.statistics import Moments
from edge_client.wire import schema as schemas
from edge_client.wire.schema import DataSchema
from edge_client.wire.statistics import StatisticsRequest, StatisticsResult

MIN_SITES = 2
"""Below, means would be those of a single device."""


def ask(
    services: Services, deployment: Deployment, experiment: Experiment, document: Mapping[str, Any] | None
) -> tuple[DataSchema | None, list[str]]:
    """The data schema scaled by the run's devices, and notices; None where its scale is another, or stays as it is.

    `document`: the schema of the coordinator's own table. With fewer than two devices that report statistics it stays,
    and a notice says so.

    Raises:
        Stopped: the process is ending.
    """
    schema = None if document is None else schemas.from_document(document)
    if schema is None or schema.scale != "federated":
        return None, []
    numbers = tuple(column.name for column in schema.columns if column.mean is not None)
    if not numbers:
        return None, []
    results = _ask(services, deployment, experiment, numbers)
    if len(results) < MIN_SITES:
        return None, [
            f'data.scale = "federated": {len(results)} devices reported statistics, {MIN_SITES} are needed, because the mean of one '
            "device would be its own, in every release; numbers are scaled by the coordinator's own table"
        ]
    scale = scale_of(results, experiment.federation.weight_cap)
    missing = [name for name in numbers if name not in scale.moments]
    rest = (
        f"; by the coordinator's own table, because no device reported them: {', '.join(missing)}"
        if missing
        else ""
    )
    return _scaled(schema, scale.moments), [
        f"numbers are scaled by the means and deviations of {len(results)} devices{rest}",
        *scale.notices,
    ]


def _ask(
    services: Services, deployment: Deployment, experiment: Experiment, columns: tuple[str, ...]
) -> dict[str, StatisticsResult]:
    """Statistics of these columns by the name of the device, of those that report any."""
    collecting = replace(deployment, kind="statistics")
    services.deployments.add(collecting)  # devices that check in now are held, not sent away
    wanted = experiment.devices
    cohort = experiment.federation.clients_per_round or COHORT
    patience = Patience(cohort, wanted.patience_seconds, wanted.evaluate_seconds)
    request = StatisticsRequest(minimum_count(experiment.data), columns)
    results = StatisticsFleet(services, collecting).ask(0, request, patience)
    names = services.database.read(partial(devices.names, ids=results.keys()))
    return {names[device]: result for device, result in results.items() if result.rows}


def _scaled(schema: DataSchema, found: Mapping[str, Moments]) -> DataSchema:
    columns = []
    for column in schema.columns:
        if column.mean is not None and column.name in found:
            _, mean, deviation = found[column.name]
            column = replace(column, mean=mean, deviation=deviation)
        columns.append(column)
    return replace(schema, columns=tuple(columns))
