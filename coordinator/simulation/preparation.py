"""What a simulation needs before its first round: data dealt out, clients, the model and its artifact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import adapting
from coordinator.errors import UserError
from coordinator.experiment import Experiment, Runtime
from coordinator.fleets.simulated import SimulatedClient
from coordinator.planning import model_for
from coordinator.progress import Progress
from coordinator.rounds.plan import generator
from coordinator.simulation import faults
from coordinator.simulation.pool import WorkerPool
from edge_client.files import read_regular
from edge_client.process import Launch
from edge_client.wire import arrays
from models.export import request as export_request
from strategies.params import Params, ShapeMismatch, require_same_shapes


@dataclass(frozen=True)
class Prepared:
    """Data and model of a run; the pool's workers have both open.

    Attributes:
        found: what loading the data found (see `coordinator.simulation.workspace.prepare`).
        params: where the run starts.
    """

    found: Mapping[str, Any]
    clients: tuple[SimulatedClient, ...]
    params: Params
    trainable: tuple[str, ...]


def prepare(
    experiment: Experiment, folder: Path, pool: WorkerPool, data_dir: Path | None, progress: Progress
) -> Prepared:
    """Fills the workspace `folder`, or takes up one that is complete, and opens it in all workers.

    Raises:
        UserError: the data, the model or their combination is wrong.
    """
    progress.stage("loading and partitioning the data")
    found = load_data(experiment, folder, pool, data_dir)
    for line in found["preview"]:
        progress.note(line)
    clients = _clients(experiment, found)
    model = model_for(experiment, found)
    progress.stage("building the model")
    model, params, trainable = start(experiment, model, folder, pool, _init_params(experiment))
    if any(client.runtime == "litert" for client in clients):
        progress.stage("exporting the model to LiteRT")
        exported = export(experiment, model)
        model |= {"tflite": str(exported.tflite), "manifest": str(exported.manifest)}
    pool.tell({"kind": "open", "folder": str(folder), "model": model})
    return Prepared(found, clients, params, trainable)


def start(
    experiment: Experiment, model: Mapping[str, Any], folder: Path, pool: WorkerPool, init: bytes | None
) -> tuple[dict[str, Any], Params, tuple[str, ...]]:
    """The model as workers are told of it, the params that a run begins with, and the names of those that are trained.

    `init`: the file that `model.init` names. What a run that adapts a model keeps frozen lies in `folder` then.

    Raises:
        UserError: the model cannot be built, or `model.init` does not fit it.
    """
    params, trainable = build(experiment, model, pool)
    if init is not None:
        params = starting_params(f"model.init = {experiment.model.init!r}", init, params)
    if experiment.model.adapt is None:
        return dict(model), params, trainable
    adapting.freeze(params, folder)
    told = adapting.adapted(experiment, model, folder)
    return told, *build(experiment, told, pool)


def _init_params(experiment: Experiment) -> bytes | None:
    """The file that `model.init` names, on the machine of whoever runs this."""
    if experiment.model.init is None:
        return None
    try:
        return read_regular(Path(experiment.model.init))
    except OSError as error:
        raise UserError(f"model.init = {experiment.model.init!r}: {error.strerror}") from None


def build(
    experiment: Experiment, model: Mapping[str, Any], pool: WorkerPool
) -> tuple[Params, tuple[str, ...]]:
    """Fresh params of the model from the experiment's seed, and the names of those that clients train.

    Raises:
        UserError: the model cannot be built, or not for the runtimes asked for.
    """
    made = pool.one({"kind": "initial", "model": dict(model), "seed": experiment.seed})
    if "torch" in experiment.federation.runtimes and made.values["framework"] == "keras":
        raise UserError(
            f"federation.runtimes asks for torch, as it does unless set, but model.name = {experiment.model.name!r} is a "
            "Keras model, which trains in: litert, tensorflow; leave torch out: --set 'federation.runtimes={litert=1}'"
        )
    if "tensorflow" in experiment.federation.runtimes and not made.values["twin"]:
        raise UserError(
            f"federation.runtimes asks for tensorflow, but model.name = {experiment.model.name!r} has no TensorFlow "
            "twin; its builder may return a ModelSpec with tensorflow_twin, or leave tensorflow out"
        )
    return arrays.decode(made.blobs[0]), tuple(made.values["trainable"])


def starting_params(named: str, content: bytes, built: Params) -> Params:
    """The params of a safetensors file, float32. `named`: what messages call it.

    Raises:
        UserError: it is none, or does not fit the model, whose own params are `built`.
    """
    try:
        given = arrays.decode(content)
        require_same_shapes(given, built)
    except arrays.Malformed:  # whose message would quote a file that is something else
        raise UserError(f"{named} is not a safetensors file") from None
    except ShapeMismatch as error:
        raise UserError(f"{named} does not fit the model: {error}") from None
    return {name: value.astype(np.float32) for name, value in given.items()}


def assign_runtimes(shares: Mapping[Runtime, float], count: int, seed: int) -> list[str]:
    """A runtime for each of `count` clients: shares by largest remainder, dealt out in an order drawn by `seed`."""
    total = sum(shares.values())
    exact = {name: share / total * count for name, share in sorted(shares.items())}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    dealt = [name for name in counts for _ in range(counts[name])]
    return [dealt[index] for index in generator(seed, "runtimes").permutation(count)]


def load_data(
    experiment: Experiment, folder: Path, pool: WorkerPool, data_dir: Path | None, *, quotes: bool = True
) -> dict[str, Any]:
    """What loading the data finds; its arrays are in the workspace `folder` then.

    `quotes`: whether errors may show a little of what is in the files.

    Raises:
        UserError: the data or its description is wrong.
    """
    done = folder / "found.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text("utf-8"))
        return found
    request = {
        "kind": "prepare",
        "folder": str(folder),
        "seed": experiment.seed,
        "data": experiment.data.model_dump(),
        "clients": experiment.federation.clients,
        "data_dir": str(data_dir) if data_dir else None,
        "quotes": quotes,
    }
    return pool.one(request).values


def _clients(experiment: Experiment, found: Mapping[str, Any]) -> tuple[SimulatedClient, ...]:
    names: list[str] = experiment.simulation.names or found["clients"]
    if len(names) != len(found["clients"]):
        raise UserError(
            f"simulation.names holds {len(names)} names, but the data has {len(found['clients'])} sites; "
            "expected a name for each"
        )
    faulty = faults.assign(experiment.simulation.faults, names, experiment.seed)
    runtimes = assign_runtimes(experiment.federation.runtimes, len(names), experiment.seed)
    return tuple(
        SimulatedClient(name, index, found["examples"][index], runtimes[index], faulty.get(name))
        for index, name in enumerate(names)
    )


def export(
    experiment: Experiment,
    model: Mapping[str, Any],
    cache_dir: Path | None = None,
    launch: Launch | None = None,
) -> export_request.Exported:
    """The model's artifact for LiteRT clients, made or found in the cache; `launch`: how the process is started.

    Raises:
        UserError: the model cannot be exported.
    """
    asked = export_request.ExportRequest(
        model=model["name"],
        options=model["options"],
        input_shape=tuple(model["input_shape"]),
        classes=model["classes"],
        input_dtype=model["input_dtype"],
        task=model["task"],
        batch_size=experiment.local.batch_size,
    )
    try:
        cache = cache_dir or export_request.default_cache_dir()
        return export_request.export(asked, cache, code_folder=Path.cwd(), launch=launch)
    except export_request.ExportError as error:
        raise UserError(
            f"model {model['name']!r} cannot be exported for LiteRT clients: {error}; "
            "without them: --set 'federation.runtimes={torch=1}'"
        ) from None
