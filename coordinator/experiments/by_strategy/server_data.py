"""The rows of the server's own: where they come from, which strategies need them, and what those do not go with.

They are rows of the run's own data that no client gets,

    [data]
    public_samples = 300

or those of another data set, which is read as the clients' is:

    [server_data]
    dataset = "npz"
    path = "public.npz"
    samples = 300
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from models.datasets import names
from models.datasets.dataset import DataError

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind
    from coordinator.experiments.sections import ServerData


def request_of(table: ServerData, *, with_labels: bool) -> dict[str, Any]:
    """What a worker loads for the server (`coordinator.workers.server_rows`). `with_labels`: whether the labels count."""
    if table.dataset is None:
        return {"dataset": None}
    loaded_as = names.loaded_as(table.dataset, table.path)
    return {**table.model_dump(), "dataset": loaded_as, "with_labels": with_labels}


def find_problems(experiment: Experiment, fleet: FleetKind, is_used: bool) -> Iterator[str]:
    """One sentence for each problem of the table `[server_data]` and of a strategy that needs rows of the server's own.

    `is_used`: whether the strategy needs them.
    """
    table, strategy = experiment.server_data, f"strategy.name = {experiment.strategy.name!r}"
    given = table.model_dump(exclude_none=True)
    if not is_used:
        if given:
            yield f"server_data.{next(iter(given))} is for strategies whose server has rows of its own, not for {strategy}; leave it out"
        return
    if fleet == "devices":
        yield f"{strategy} works in simulations only: a coordinator of devices trains no model in a round; take another strategy"
        return
    if table.dataset is None:
        yield from _own_rows_problems(experiment, strategy, given)
    else:
        yield from _other_data_problems(experiment)


def _own_rows_problems(experiment: Experiment, strategy: str, given: dict[str, Any]) -> Iterator[str]:
    for key, value in given.items():
        more = "; rows of the run's own data are data.public_samples" if key == "samples" else ""
        yield f"server_data.{key} = {value!r} is about another data set of the server; give server_data.dataset too{more}"
    if not given and not experiment.data.public_samples:
        yield (
            f"data.public_samples = 0, but {strategy} needs rows of the server's own: set data.public_samples to training rows that no "
            "client gets, such as 300, or server_data.dataset to another data set"
        )


def _other_data_problems(experiment: Experiment) -> Iterator[str]:
    table, data = experiment.server_data, experiment.data
    dataset = table.dataset or ""
    loaded_as = names.loaded_as(dataset, table.path)
    try:
        names.check_name(loaded_as)
    except DataError as error:
        yield f"server_data.dataset: {error}"
    if loaded_as in ("csv", "npz") and table.path is None:
        yield f'server_data.dataset = "{dataset}" needs server_data.path, the file to read'
    if table.path is not None and loaded_as not in ("csv", "npz"):
        yield f"server_data.path = {table.path!r} is for csv and npz, but server_data.dataset = {dataset!r}"
    if table.label is not None and loaded_as != "csv":
        yield f"server_data.label = {table.label!r} is for csv, but server_data.dataset = {dataset!r}"
    if (loaded_as == "csv") != (data.loaded_as == "csv"):
        yield (
            f"server_data.dataset = {dataset!r}, but data.dataset = {data.dataset!r}: the rows of a table are read by its columns; "
            "expected a table for both, or for neither"
        )
    if (loaded_as, table.path) == (data.loaded_as, data.path):
        yield (
            f"server_data.dataset = {dataset!r} is the data of the clients; for rows of it that no client gets set data.public_samples "
            "instead"
        )
