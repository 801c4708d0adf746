"""What a simulation needs before its first round: partitioned data, clients, the model and its artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment, Runtime
from coordinator.fleets.simulated import SimulatedClient
from coordinator.reports.progress import Progress
from coordinator.rounds.plan import generator
from coordinator.runs.model_setup import export_model, load_data, set_up_model
from coordinator.workers import faults
from coordinator.workers.pool import WorkerPool
from edge_client.files import read_regular
from strategies.params import Params


@dataclass(frozen=True)
class Prepared:
    """Data and model of a run; the workers have both open.

    Attributes:
        folder: the workspace.
        data_info: description of the data (`coordinator.workers.workspace.prepare`).
        params: initial params.
    """

    folder: Path
    data_info: Mapping[str, Any]
    clients: tuple[SimulatedClient, ...]
    params: Params
    trainable: tuple[str, ...]


def prepare(
    experiment: Experiment, folder: Path, pool: WorkerPool, data_dir: Path | None, progress: Progress
) -> Prepared:
    """Fills the workspace `folder` unless it is complete, and opens it in all workers.

    Raises:
        UserError: the data, the model or their combination is wrong.
    """
    progress.stage("loading and partitioning the data")
    data_info = load_data(experiment, folder, pool, data_dir)
    for line in (*data_info["preview"], *_describe_sites(experiment, data_info)):
        progress.note(line)
    clients = _make_clients(experiment, data_info)
    model = experiment.model.describe(data_info)
    progress.stage("building the model")
    model, params, trainable = set_up_model(
        experiment, model, folder, pool, _read_init(experiment), data_info.get("ids", 0)
    )
    if any(client.runtime == "litert" for client in clients):
        progress.stage("exporting the model to LiteRT")
        exported = export_model(experiment, model)
        model |= {"tflite": str(exported.tflite), "manifest": str(exported.manifest)}
    pool.broadcast({"kind": "open", "folder": str(folder), "model": model})
    return Prepared(folder, data_info, clients, params, trainable)


def _describe_sites(experiment: Experiment, data_info: Mapping[str, Any]) -> list[str]:
    """A line that says whether the sites of the data are the clients."""
    if not data_info["site_names"]:
        return []
    if experiment.data.partition == "natural":
        return ["Each site is a client."]
    return [
        f"The sites are not the clients: data.partition = {experiment.data.partition!r} deals the rows of all sites out to "
        f'{len(data_info["clients"])} clients; with data.partition = "natural" each site is a client.'
    ]


def _read_init(experiment: Experiment) -> bytes | None:
    """Contents of the file that `model.init` names."""
    if experiment.model.init is None:
        return None
    try:
        return read_regular(Path(experiment.model.init))
    except OSError as error:
        raise UserError(f"model.init = {experiment.model.init!r}: {error.strerror}") from None


def _make_clients(experiment: Experiment, data_info: Mapping[str, Any]) -> tuple[SimulatedClient, ...]:
    names: list[str] = experiment.simulation.names or data_info["clients"]
    if len(names) != len(data_info["clients"]):
        raise UserError(
            f"simulation.names holds {len(names)} names, but the data has {len(data_info['clients'])} sites; "
            "expected a name for each"
        )
    faulty = faults.assign(experiment.simulation.faults, names, experiment.seed)
    runtimes = assign_runtimes(experiment.federation.runtimes, len(names), experiment.seed)
    return tuple(
        SimulatedClient(name, index, data_info["examples"][index], runtimes[index], faulty.get(name))
        for index, name in enumerate(names)
    )


def assign_runtimes(shares: Mapping[Runtime, float], count: int, seed: int) -> list[str]:
    """A runtime for each of `count` clients: numbers by largest remainder, in an order drawn by `seed`."""
    total = sum(shares.values())
    exact = {name: share / total * count for name, share in sorted(shares.items())}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    names = [name for name in counts for _ in range(counts[name])]
    return [names[index] for index in generator(seed, "runtimes").permutation(count)]
