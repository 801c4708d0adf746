"""Federated statistics in simulation: over the clients of an experiment's partition, as devices with these rows report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments.defaults import minimum_count
from coordinator.experiments.schema import Experiment
from coordinator.reports import statistics as report
from edge_client.data.contract import options_of
from edge_client.data.options import TableOptions
from edge_client.data.statistics import bin_edges, of_records, pooled
from edge_client.data.table import Record, Table
from edge_client.wire.statistics import StatisticsRequest, StatisticsResult
from models import datasets
from models.datasets import columns


def simulate_statistics(experiment: Experiment) -> dict[str, Any]:
    """The report of a statistics round over the clients of the experiment; its data must be a table.

    Raises:
        UserError: the data is no table, or wrong.
    """
    data = experiment.data
    if data.loaded_as != "csv" or data.path is None:
        raise UserError(
            f'data.dataset = {data.dataset!r}: statistics are of the columns of a table; expected data.dataset = "csv" with data.path'
        )
    try:
        table, options, clients = _clients(experiment, Path(data.path))
        quantity = data.label if data.task == "regression" else ""
        request = StatisticsRequest(minimum_count(data), quantity=bool(quantity))
        first = _ask(table, options, clients, request)
        request = replace(request, edges=bin_edges(pooled(first.values()), report.BINS))
        return report.make_report(_ask(table, options, clients, request), quantity=quantity)
    except datasets.DataError as error:
        raise UserError(str(error)) from None


def _ask(
    table: Table,
    options: TableOptions,
    clients: Mapping[str, Sequence[Record]],
    request: StatisticsRequest,
) -> dict[str, StatisticsResult]:
    return {name: of_records(table, records, options, request) for name, records in clients.items()}


def _clients(experiment: Experiment, path: Path) -> tuple[Table, TableOptions, dict[str, list[Record]]]:
    """The table, how to read it, and the training rows of each client."""
    data, seed, count = experiment.data, experiment.data_seed, experiment.federation.clients
    assert data.partition is not None, "it has a default"
    dataset = datasets.from_settings(data.to_load, seed=seed, clients=count)
    public = datasets.public_rows(dataset, data.public_samples, seed)
    parts = datasets.partition(data.partition, dataset, clients=count, seed=seed, exclude=public)
    names = datasets.client_names(data.partition, dataset, len(parts))
    table = columns.read(path, data.encoding)
    records = {
        name: [table.records[row] for row in rows.tolist()] for name, rows in zip(names, parts, strict=True)
    }
    return table, options_of(dataset.described), records
