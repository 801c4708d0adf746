"""A user's own model in a run on devices, as content: made where its code is, checked here without running code.

    artifact   its `.tflite`: a training step and logits, of operations that every runtime has
    manifest   what the artifact takes and returns, and its golden outputs
    params     to start from, safetensors

The files are blobs before the run exists (`coordinator.registry.registration.hold_files`). A worker in the sandbox checks the
artifact, and scores the held-out rows with it. The run's report and its versions record their
hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import extras
from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.registry.kinds import OWN_FILES
from coordinator.runs.initial_params import decode_init
from coordinator.storage.blobs import Blobs
from coordinator.workers.pool import WorkerPool
from edge_client.files import read_regular, write_durably
from edge_client.wire import manifest as manifests
from edge_client.wire import strict
from edge_client.wire.device import BlobRef
from edge_client.wire.manifest import Manifest
from models import user_code
from models.tasks import MODEL_KEYS
from strategies.params import Params

MANIFEST_LIMIT_BYTES = 16 * 2**20


@dataclass(frozen=True)
class OwnModel:
    """The files of a user's own model, by hash."""

    artifact: BlobRef
    manifest: BlobRef
    params: BlobRef

    @staticmethod
    def read(document: Mapping[str, Any] | None) -> OwnModel | None:
        """From its stored form, which is `dataclasses.asdict` of it; None if the run has none."""
        return None if document is None else strict.parse(OwnModel, document, "own_model")


def require_fit(experiment: Experiment) -> None:
    """Checks that a run of this experiment can have its model as content.

    Raises:
        UserError: `own_model_unfit`: the model is the coordinator's, is adapted, or no LiteRT device may take part.
    """
    name, problem = experiment.model.name or "", ""
    if not user_code.is_own(name):
        problem = (
            "is a model that coordinators and devices have; only package.module:build and .keras files travel"
        )
    elif experiment.model.adapt is not None:
        problem = (
            f"travels as an artifact without its code, which model.adapt = {experiment.model.adapt!r} needs; leave "
            "model.adapt out, or use fedloop simulate"
        )
    elif "litert" not in experiment.federation.runtimes:
        allowed = ", ".join(sorted(experiment.federation.runtimes))
        problem = (
            f"travels as a LiteRT artifact, and federation.runtimes allows only {allowed}; add litert: "
            "--set 'federation.runtimes={litert=1}'"
        )
    if problem:
        raise UserError(f"model.name = {name!r} {problem}", "own_model_unfit")


def require_interpreter() -> None:
    """Checks that this installation can run artifacts.

    Raises:
        UserError: `no_interpreter`.
    """
    if lacking := extras.missing("LiteRT clients"):
        raise UserError(
            f"to check and score the model, the coordinator needs {', '.join(lacking)}, not installed there; "
            f"{extras.how_to_install('LiteRT clients')}",
            "no_interpreter",
        )


def set_up(
    experiment: Experiment,
    shape: Mapping[str, Any],
    ids: int,
    own: OwnModel,
    blobs: Blobs,
    folder: Path,
    pool: WorkerPool,
    init: bytes | None,
) -> tuple[Params, tuple[str, ...]]:
    """The initial params and the names of the trained ones, once artifact, manifest and params were found to be of one model.

    `shape`: the `MODEL_KEYS` of the data. `ids`: number of its token ids, 0 if it has none or they are unknown. `init`:
    contents of the file of a version that `model.init` names.

    Raises:
        UserError: they do not belong together, do not fit the experiment or the data, or compute something else here.
        BlobDamaged: a blob is damaged.
    """
    manifest = _read_manifest(blobs, own)
    _require_experiment(experiment, manifest, own)
    _require_shape(manifest, shape, ids)
    named = "the params that came with model.name"
    content = read_regular(blobs.require_intact(own.params.sha256))
    if init is not None:
        named, content = f"model.init = {experiment.model.init!r}", init
    # Before the worker runs the artifact: params of these shapes were sent, so they are no larger than an upload.
    expected = {tensor.name: np.broadcast_to(np.float32(0), tensor.shape) for tensor in manifest.tensors}
    params = decode_init(named, content, expected)
    if unfit := [name for name, value in params.items() if not np.isfinite(value).all()]:
        raise UserError(f"{named}: {unfit[0]!r} is not finite")
    place(blobs, own, folder)
    pool.run_one({"kind": "verify", **_files(folder)})
    return params, manifest.trainable


def place(blobs: Blobs, own: OwnModel, folder: Path) -> None:
    """Copies artifact and manifest into the run's folder, where its workers can read them.

    They may change them too, so that the copies are made again at each start.

    Raises:
        BlobDamaged: a blob is damaged.
    """
    for path, ref in ((OWN_FILES["artifact"], own.artifact), (OWN_FILES["manifest"], own.manifest)):
        write_durably(folder / path, read_regular(blobs.require_intact(ref.sha256)))


def for_scoring(model: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The description of `model` by which workers score it with its artifact in `folder`, in place of its code."""
    return {**model, **_files(folder), "evaluation": "litert"}


def _files(folder: Path) -> dict[str, str]:
    return {"tflite": str(folder / OWN_FILES["artifact"]), "manifest": str(folder / OWN_FILES["manifest"])}


def _read_manifest(blobs: Blobs, own: OwnModel) -> Manifest:
    size = own.manifest.size_bytes
    if size > MANIFEST_LIMIT_BYTES:
        raise UserError(f"own_model.manifest has {size:,} bytes, expected at most {MANIFEST_LIMIT_BYTES:,}")
    content = read_regular(blobs.require_intact(own.manifest.sha256))
    try:
        return manifests.from_json(content, "own_model.manifest")
    except manifests.ManifestError as error:
        raise UserError(str(error)) from None


def _require_experiment(experiment: Experiment, manifest: Manifest, own: OwnModel) -> None:
    pairs = (
        ("is of the model", manifest.model, experiment.model.name),
        ("takes batches of", manifest.batch_size, experiment.local.batch_size),
        ("describes an artifact with the hash", manifest.file.sha256, own.artifact.sha256),
        ("describes an artifact with a size of", manifest.file.size_bytes, own.artifact.size_bytes),
    )
    _require_equal(pairs, "the experiment came with")


def _require_shape(manifest: Manifest, shape: Mapping[str, Any], ids: int) -> None:
    actual = (tuple(manifest.input.shape), manifest.classes, manifest.input.dtype, manifest.task)
    expected = (tuple(shape["input_shape"]), *(shape[key] for key in MODEL_KEYS[1:]))
    names = (f"was made for the {key}" for key in MODEL_KEYS)
    _require_equal(zip(names, actual, expected, strict=True), "the data has")
    vocab = manifest.input.vocab
    if vocab is not None and ids > vocab:
        raise UserError(
            f"the data has token ids 0 to {ids - 1}, model.name = {manifest.model!r} takes 0 to {vocab - 1}"
        )


def _require_equal(pairs: Any, where: str) -> None:
    for what, actual, expected in pairs:
        if actual != expected:
            raise UserError(f"own_model.manifest {what} {_text(actual)}, {where} {_text(expected)}")


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)[:200]
