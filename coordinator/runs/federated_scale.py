"""Numbers of a run on devices, scaled by the mean and deviation over all of them (`data.scale = "federated"`).

The coordinator reads its own table first, and with it the columns. Before round 1 it asks the devices that match the run for
statistics. Their pooled means and deviations replace those of its own table: in the data schema that devices train by, and in
its own held-out rows, which are read again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from coordinator.context.services import Services
from coordinator.experiments.defaults import COHORT, minimum_count
from coordinator.experiments.schema import Experiment
from coordinator.fleets.statistics import Patience, StatisticsFleet
from coordinator.runs.live_preparation import Place, Prepared, put_schema, with_moments
from coordinator.runs.model_setup import load_data
from coordinator.scheduling.deployments import Deployment
from edge_client.data.statistics import Moments, moments, pooled
from edge_client.wire import schema as schemas
from edge_client.wire.schema import DataSchema
from edge_client.wire.statistics import StatisticsRequest

LEAST_SITES = 2
"""Below, means would be those of a single device."""


def scale(
    services: Services, deployment: Deployment, experiment: Experiment, prepared: Prepared, place: Place
) -> tuple[Prepared, list[str]]:
    """The prepared run scaled by its devices, and a notice; the same run where its scale is another.

    With fewer than two devices that tell statistics, the coordinator's own table keeps its say, and the notice says so.

    Raises:
        Stopped: the process is ending.
        UserError: the coordinator's table cannot be read again.
    """
    schema = None if prepared.data is None else schemas.from_document(prepared.data["schema"])
    if schema is None or schema.scale != "federated":
        return prepared, []
    numbers = tuple(column.name for column in schema.columns if column.mean is not None)
    if not numbers:
        return prepared, []
    found, sites = _ask(services, deployment, experiment, numbers)
    if sites < LEAST_SITES:
        return prepared, [
            f'data.scale = "federated": {sites} devices told statistics, {LEAST_SITES} are needed; numbers are scaled by the '
            "coordinator's own table"
        ]
    untold = [name for name in numbers if name not in found]
    rest = (
        f"; by the coordinator's own table, because no device told them: {', '.join(untold)}"
        if untold
        else ""
    )
    notice = f"numbers are scaled by the means and deviations of {sites} devices{rest}"
    return _read_again(experiment, prepared, _scaled(schema, found), place), [notice]


def _ask(
    services: Services, deployment: Deployment, experiment: Experiment, columns: tuple[str, ...]
) -> tuple[dict[str, Moments], int]:
    """Count, mean and deviation of these columns over all devices, and how many told any."""
    asked = replace(deployment, kind="statistics")
    services.deployments.add(asked)  # devices that check in now are held, not sent away
    wanted = experiment.devices
    cohort = experiment.federation.clients_per_round or COHORT
    patience = Patience(cohort, wanted.patience_seconds, wanted.evaluate_seconds)
    request = StatisticsRequest(minimum_count(experiment.data), columns)
    told = StatisticsFleet(services, asked).ask(0, request, patience)
    return moments(pooled(told.values())), sum(result.rows > 0 for result in told.values())


def _scaled(schema: DataSchema, found: Mapping[str, Moments]) -> DataSchema:
    columns = []
    for column in schema.columns:
        if column.mean is not None and column.name in found:
            _, mean, deviation = found[column.name]
            column = replace(column, mean=mean, deviation=deviation)
        columns.append(column)
    return replace(schema, columns=tuple(columns))


def _read_again(experiment: Experiment, prepared: Prepared, schema: DataSchema, place: Place) -> Prepared:
    """The run with this schema, and the coordinator's rows in its workspace scaled by it."""
    assert prepared.data is not None, "there is a schema"
    fixed = {
        column.name: (column.mean, column.deviation)
        for column in schema.columns
        if column.mean is not None and column.deviation is not None
    }
    scaled = replace(prepared, fixed=fixed)
    (place.folder / "found.json").unlink()
    data_info = load_data(
        with_moments(experiment, scaled), place.folder, place.pool, place.settings.data_dir, quotes=False
    )
    data = {**prepared.data, "fingerprint": data_info["fingerprint"], "schema": json.loads(schema.to_json())}
    return replace(scaled, data=data, schema=put_schema(schema, place.blobs))
