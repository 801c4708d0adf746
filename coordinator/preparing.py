"""What a run on devices needs before its first round: the model, where it starts, its artifact, rows to score it on.

Frameworks and a user's code run in worker processes. What was found is written down with the run (`Prepared`), so
that a coordinator that is started again goes on with the very same model, and notices if the data changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator import adapting
from coordinator.blobs import Blobs
from coordinator.errors import UserError
from coordinator.experiment import Experiment, name_problem
from coordinator.planning import MODEL_KEYS, model_for
from coordinator.sandbox import policy
from coordinator.settings import Settings
from coordinator.simulation.evaluation import accuracy_by_group, evaluate
from coordinator.simulation.pool import WorkerPool
from coordinator.simulation.preparation import export, load_data, start
from edge_client.files import read_regular
from edge_client.train.trainer import Evaluation
from edge_client.wire import strict
from edge_client.wire.device import BlobRef, ModelRef, RuntimeName
from models.export import answered
from models.export import request as export_request
from strategies.params import Params, Tensors

_PREFERRED: tuple[RuntimeName, ...] = ("litert", "torch", "tensorflow")


@dataclass(frozen=True)
class Prepared:
    """A run's model, as stored with it.

    Attributes:
        trainable: names of the tensors that clients train.
        runtimes: allowed ones, the preferred first.
        data: what loading the data found, where the coordinator could; then it scores every round.
        start: `test_loss` and `test_accuracy` of the params it starts from, and on how many `test_rows`.
    """

    model: ModelRef
    trainable: tuple[str, ...]
    runtimes: tuple[RuntimeName, ...]
    artifact: BlobRef | None
    manifest: BlobRef | None
    data: Mapping[str, Any] | None
    start: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(document: Mapping[str, Any]) -> Prepared:
    """What `Prepared.to_json` gave."""
    return strict.parse(Prepared, document, "prepared")


@dataclass(frozen=True)
class Place:
    """Where a run is prepared: its folder, the workers that do it, and what they may use."""

    folder: Path
    pool: WorkerPool
    blobs: Blobs
    settings: Settings


def prepare(experiment: Experiment, place: Place, init: bytes | None) -> tuple[Prepared, Params, list[str]]:
    """The run's model, the params it starts from, and notices of what goes otherwise than the file says.

    `init`: the file that `model.init` names.

    Raises:
        UserError: the data, the model or their combination is wrong.
    """
    notices: list[str] = []
    data = _data(experiment, place, notices)
    shape = _shape(experiment, data)
    model = model_for(experiment, shape)
    model, params, trainable = start(experiment, model, place.folder, place.pool, init)
    runtimes = tuple(name for name in _PREFERRED if name in experiment.federation.runtimes)
    if experiment.model.adapt is not None:
        runtimes = _with_backbone(runtimes, experiment.model.adapt, notices)
    artifact: tuple[BlobRef, BlobRef] | None = None
    if "litert" in runtimes:
        artifact = _artifact(experiment, model, place, notices)
    if artifact is None:
        runtimes = tuple(name for name in runtimes if name != "litert")
    reference = ModelRef(
        name=experiment.model.name or "",
        options=experiment.model.options,
        input_shape=tuple(shape["input_shape"]),
        classes=shape["classes"],
        input_dtype=shape["input_dtype"],
        task=shape["task"],
    )
    tflite, manifest = artifact or (None, None)
    return Prepared(reference, trainable, runtimes, tflite, manifest, data), params, notices


@dataclass(frozen=True)
class HeldOut:
    """Rows that the coordinator has itself, and workers to score a model on them.

    Attributes:
        rows: how many.
        sites: index of each row's site; empty where the data has none.
    """

    pool: WorkerPool
    rows: int
    sites: npt.NDArray[np.int32]
    site_names: tuple[str, ...]

    def score(self, params: Tensors) -> Evaluation:
        return evaluate(self.pool, self.rows, params)

    def per_site(self, scored: Evaluation) -> dict[str, dict[str, Any]]:
        """Rows and accuracy of each site."""
        if not self.sites.size:
            return {}
        rows = np.bincount(self.sites, minlength=len(self.site_names))
        accuracy = accuracy_by_group(scored, self.sites, self.site_names)
        return {
            name: {"test_rows": int(rows[i]), "test_accuracy": accuracy[name]}
            for i, name in enumerate(self.site_names)
        }


def open_held_out(
    experiment: Experiment, prepared: Prepared, folder: Path, pool: WorkerPool, data_dir: Path | None
) -> HeldOut | None:
    """The rows that score the run, loaded again if need be; None where the coordinator has none.

    Raises:
        UserError: the data is not what the run began with.
    """
    if prepared.data is None:
        return None
    found = load_data(experiment, folder, pool, data_dir, quotes=False)
    if found["fingerprint"] != prepared.data["fingerprint"]:
        raise UserError("the data is not what the run began with (its fingerprint differs)")
    model = adapting.adapted(experiment, model_for(experiment, found), folder)
    pool.tell({"kind": "open", "folder": str(folder), "model": model})
    test_rows = np.load(folder / "test_rows.npy", allow_pickle=False)
    sites = np.load(folder / "sites.npy", allow_pickle=False)
    of_rows = sites[test_rows] if sites.size else sites
    return HeldOut(pool, len(test_rows), of_rows, tuple(found["site_names"])) if len(test_rows) else None


def _data(experiment: Experiment, place: Place, notices: list[str]) -> dict[str, Any] | None:
    """What loading the data found; None, with a notice, where only the devices can."""
    data = experiment.data
    if (problem := name_problem(data.dataset)) is None:
        try:
            found = load_data(experiment, place.folder, place.pool, place.settings.data_dir, quotes=False)
        except UserError as error:
            if not data.is_described:
                raise
            problem = str(error)
        else:
            _require_described(experiment, found)
            return {key: found[key] for key in ("fingerprint", *MODEL_KEYS, "preview", "site_names")}
    notices.append(
        f"data.dataset = {data.dataset!r}: the coordinator has no rows of its own to score the model on ({problem})"
    )
    return None


def _require_described(experiment: Experiment, found: Mapping[str, Any]) -> None:
    for key in MODEL_KEYS:
        given = getattr(experiment.data, key)
        if given is not None and given != found[key]:
            raise UserError(f"data.{key} = {given!r}, but the data set has {found[key]!r}")


def _shape(experiment: Experiment, found: Mapping[str, Any] | None) -> dict[str, Any]:
    if found is not None:
        return {key: found[key] for key in MODEL_KEYS}
    data = experiment.data
    return {
        "input_shape": data.input_shape,
        "classes": data.classes,
        "input_dtype": data.input_dtype or "float32",
        "task": data.task or "classification",
    }


def _artifact(
    experiment: Experiment, model: Mapping[str, Any], place: Place, notices: list[str]
) -> tuple[BlobRef, BlobRef] | None:
    """The `.tflite` and its manifest as blobs; None, with a notice, where other runtimes can do without."""
    cache = _cache(experiment, place)
    try:
        exported = export(experiment, model, cache, policy.launch(place.settings, place.folder, cache))
    except UserError as error:
        if experiment.federation.runtimes.keys() == {"litert"}:
            raise
        notices.append(f"no LiteRT device takes part: {error}")
        return None
    tflite, manifest = (
        _stored(place.blobs, read_regular(path)) for path in (exported.tflite, exported.manifest)
    )
    return tflite, manifest


def _cache(experiment: Experiment, place: Place) -> Path:
    """Where converted artifacts are kept: those of models that are not ours for this run alone.

    Whoever converts may change the folder, and so what other runs would find there.
    """
    if answered.known(experiment.model.name or ""):
        return export_request.default_cache_dir()
    return place.folder / "artifacts"


def _with_backbone(
    runtimes: tuple[RuntimeName, ...], adapt: str, notices: list[str]
) -> tuple[RuntimeName, ...]:
    """Of the runtimes those whose devices get the backbone: it is in the artifact, nowhere else.

    Raises:
        UserError: none of them.
    """
    if "litert" not in runtimes:
        raise UserError(
            f"model.adapt = {adapt!r}: devices get the frozen backbone with the LiteRT artifact; "
            "allow litert in federation.runtimes"
        )
    if len(runtimes) > 1:
        notices.append(
            f"model.adapt = {adapt!r}: only LiteRT devices take part, whose artifact holds the backbone"
        )
    return ("litert",)


def _stored(blobs: Blobs, content: bytes) -> BlobRef:
    return BlobRef(blobs.put(content), len(content))
