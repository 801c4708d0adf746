"""What a run on devices needs before its first round: the model, its initial params and artifact, and rows to score it on.

Frameworks and a user's code run in worker processes. The result is stored with the run (`Prepared`), so that a restarted
coordinator continues with the same model, and detects changed data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments import adapters
from coordinator.experiments.schema import Experiment
from coordinator.experiments.validation import dataset_name_problem
from coordinator.reports import figures
from coordinator.reports.figures import LabelledRows
from coordinator.runs import own_model
from coordinator.runs.model_setup import (
    export_model,
    load_data,
    positive_class,
    require_row_gradients,
    set_up_model,
)
from coordinator.runs.own_model import OwnModel
from coordinator.runs.population import model_classes
from coordinator.sandbox import policy
from coordinator.scheduling.deployments import ModelClass
from coordinator.settings import Settings
from coordinator.storage.blobs import Blobs
from coordinator.workers.evaluation import evaluate, score_sites
from coordinator.workers.pool import WorkerPool
from coordinator.workers.workspace_arrays import open_workspace
from edge_client.files import default_cache_dir, read_regular
from edge_client.train.evaluation import Evaluation
from edge_client.wire import schema as schemas
from edge_client.wire import strict
from edge_client.wire.device import BlobRef, ModelRef, RuntimeName
from edge_client.wire.schema import DataSchema
from models.conversion import request_cache
from models.tasks import MODEL_KEYS
from strategies.params import Params, Tensors

_PREFERRED: tuple[RuntimeName, ...] = ("litert", "torch", "tensorflow")


@dataclass(frozen=True)
class Prepared:
    """A run's model, as stored with it.

    Attributes:
        trainable: names of the tensors that clients train.
        runtimes: allowed runtimes, the preferred one first.
        data: description of the data if the coordinator could load it; then it scores every round. Of a table that only
            devices hold, its data schema alone.
        schema: how devices read a table, and what images and texts are compared with.
        reads_by_schema: whether devices cannot read their data without it: of a table, or of labels that are quantities.
        fixed: column -> mean and deviation that the coordinator's rows are scaled by, if devices reported them.
        classes: model classes of devices, the widest first; empty: all train the run's own model.
        secure_aggregation: what the report says of it; empty: updates are sent in the open.
        start: `test_loss` and `test_accuracy` of the initial params, and the number of `test_rows`.
    """

    model: ModelRef
    trainable: tuple[str, ...]
    runtimes: tuple[RuntimeName, ...]
    artifact: BlobRef | None
    manifest: BlobRef | None
    data: Mapping[str, Any] | None
    start: Mapping[str, Any] = field(default_factory=dict)
    schema: BlobRef | None = None
    reads_by_schema: bool = False
    fixed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    classes: tuple[ModelClass, ...] = ()
    secure_aggregation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_rows(self) -> bool:
        """Whether the coordinator has rows of its own, to score the model on."""
        return self.data is not None and "fingerprint" in self.data


def read(document: Mapping[str, Any]) -> Prepared:
    """A run's model from its stored form, which is `dataclasses.asdict` of it."""
    return strict.parse(Prepared, document, "prepared")


@dataclass(frozen=True)
class Place:
    """Where a run is prepared: its folder, its workers, and the coordinator's blobs and settings."""

    folder: Path
    pool: WorkerPool
    blobs: Blobs
    settings: Settings


def prepare(
    experiment: Experiment, place: Place, init: bytes | None, own: OwnModel | None = None
) -> tuple[Prepared, Params, list[str]]:
    """The run's model, its initial params, and notices where the run differs from its experiment file.

    `init`: contents of the file that `model.init` names. `own`: the user's own model, if it came with the experiment.

    Raises:
        UserError: the data, the model or their combination is wrong.
        BlobDamaged: a file of the user's own model is damaged.
    """
    notices: list[str] = []
    # An attempt that ended may have left rows scaled by devices; they are read anew.
    (place.folder / "found.json").unlink(missing_ok=True)
    data = _data(experiment, place, notices)
    shape = _shape(experiment, data)
    names = ((data or {}).get("schema") or {}).get("classes") or ()
    positive_class(
        experiment, names, shape["classes"], shape["task"]
    )  # refuses a class that the data does not have
    ids = 0 if data is None else data.get("ids", 0)
    reference = _reference(experiment, shape)
    runtimes = tuple(name for name in _PREFERRED if name in experiment.federation.runtimes)
    artifact: tuple[BlobRef, BlobRef] | None = None
    classes: tuple[ModelClass, ...] = ()
    if own is not None:
        params, trainable = own_model.set_up(
            experiment, shape, ids, own, place.blobs, place.folder, place.pool, init
        )
        artifact = own.artifact, own.manifest
        runtimes = _runtimes_of_artifact(f"model.name = {experiment.model.name!r}", runtimes, notices)
    else:
        model = experiment.model.describe(shape)
        model, params, trainable = set_up_model(experiment, model, place.folder, place.pool, init, ids)
        notices += require_row_gradients(experiment, model, place.pool)
        if experiment.model.adapt is not None:
            runtimes = _runtimes_with_backbone(runtimes, experiment.model.adapt, notices)
        classes = model_classes.set_up(experiment, model, params, place.pool, reference)
        if "litert" in runtimes:
            artifact = _artifact(experiment, model, place, notices)
        if artifact is not None and classes:
            export = partial(_artifact, experiment, place=place, notices=notices)
            made = model_classes.with_artifacts(experiment, model, classes, artifact, export)
            artifact, classes = (None, classes) if made is None else (artifact, made)
        if artifact is None:
            runtimes = tuple(name for name in runtimes if name != "litert")
    tflite, manifest = artifact or (None, None)
    schema = None if data is None else schemas.from_document(data["schema"])
    prepared = Prepared(
        reference,
        trainable,
        runtimes,
        tflite,
        manifest,
        data,
        schema=None if schema is None else put_schema(schema, place.blobs),
        reads_by_schema=schema is not None and (schema.kind == "table" or schema.label_scale is not None),
        classes=classes,
    )
    return prepared, params, notices


def _reference(experiment: Experiment, shape: Mapping[str, Any]) -> ModelRef:
    return ModelRef(
        name=experiment.model.name or "",
        options=experiment.model.options,
        input_shape=tuple(shape["input_shape"]),
        classes=shape["classes"],
        input_dtype=shape["input_dtype"],
        task=shape["task"],
    )


def put_schema(schema: DataSchema, blobs: Blobs) -> BlobRef:
    """The schema as a blob that devices download."""
    content = schema.to_json().encode()
    return BlobRef(blobs.put(content), len(content))


def scaled(experiment: Experiment, prepared: Prepared, schema: DataSchema, place: Place) -> Prepared:
    """The run with this schema, and the coordinator's rows read again, scaled by its means and deviations.

    Raises:
        UserError: the coordinator's data cannot be read again.
    """
    assert prepared.data is not None, "there is a schema"
    fixed = {
        column.name: (column.mean, column.deviation)
        for column in schema.columns
        if column.mean is not None and column.deviation is not None
    }
    changed = replace(prepared, fixed=fixed, schema=put_schema(schema, place.blobs))
    (place.folder / "found.json").unlink()
    read_by = with_moments(experiment, changed)
    data_info = load_data(read_by, place.folder, place.pool, place.settings.data_dir, quotes=False)
    described = {"fingerprint": data_info["fingerprint"], "schema": json.loads(schema.to_json())}
    return replace(changed, data={**prepared.data, **described})


def with_moments(experiment: Experiment, prepared: Prepared) -> Experiment:
    """The experiment that reads the coordinator's rows scaled as the run is."""
    if not prepared.fixed:
        return experiment
    fixed = {name: list(given) for name, given in prepared.fixed.items()}
    data = experiment.data.model_copy(update={"scale": "fixed", "fixed": fixed})
    return experiment.model_copy(update={"data": data})


@dataclass(frozen=True)
class HeldOut:
    """The coordinator's held-out rows, and workers to score a model on them.

    Attributes:
        test, train: labels of these rows, and of the coordinator's own training rows.
        data_info: description of the data (`coordinator.workers.workspace.prepare`).
        classes: of devices that train models of different width.
    """

    pool: WorkerPool
    test: LabelledRows
    train: LabelledRows
    data_info: Mapping[str, Any]
    classes: tuple[ModelClass, ...] = ()

    @property
    def rows(self) -> int:
        """Number of held-out rows."""
        return len(self.test.y)

    def score(self, params: Tensors, metric: str = "loss") -> Evaluation:
        """`metric`: the figure that is wanted of the score too."""
        return evaluate(self.pool, self.rows, params, keep_logits=metric != "loss")

    def metric(self, name: str, scored: Evaluation) -> float | None:
        """What rounds are compared by, as `figures.round_metric`."""
        return figures.round_metric(name, scored, self.test.y, self.data_info)

    def accuracy(self, scored: Evaluation) -> float | None:
        """None for labels that are quantities."""
        return None if self.data_info["task"] == "regression" else scored.accuracy

    def per_site(self, scored: Evaluation) -> dict[str, dict[str, Any]]:
        """Rows and accuracy of each site; nothing for labels that are quantities, which `judge` scores."""
        sites = self.test.sites
        if sites is None or self.data_info["task"] == "regression":
            return {}
        return score_sites(scored, sites, self.data_info["site_names"])

    def judge(self, params: Tensors) -> dict[str, Any]:
        """Figures of the final model, for the report's `final`, `per_site` and, with classes, `device_classes`."""
        keep_logits = figures.has_metrics(self.data_info, self.rows)
        final = evaluate(self.pool, self.rows, params, keep_logits=keep_logits)
        judged = figures.Judged(final, self.test, self.train)
        found = {
            "final": figures.of_all(judged, self.data_info),
            "per_site": figures.by_site(judged, self.data_info),
        }
        if self.classes:
            found["device_classes"] = model_classes.judge(
                self.pool, self.rows, params, self.classes, self.data_info["task"]
            )
        return found


def open_held_out(
    experiment: Experiment, prepared: Prepared, place: Place, own: OwnModel | None = None
) -> HeldOut | None:
    """The coordinator's held-out rows, loaded again if necessary; None if it has none.

    `own`: the user's own model, if it came with the experiment.

    Raises:
        BlobDamaged: a file of the user's own model is damaged.
        UserError: the data is not what the run began with.
    """
    if prepared.data is None or not prepared.has_rows:
        return None
    folder, pool = place.folder, place.pool
    data_info = load_data(
        with_moments(experiment, prepared), folder, pool, place.settings.data_dir, quotes=False
    )
    if data_info["fingerprint"] != prepared.data["fingerprint"]:
        raise UserError("the data is not what the run began with (its fingerprint differs)")
    model = experiment.model.describe(data_info)
    if own is not None:
        own_model.place(place.blobs, own, folder)
        model = own_model.for_scoring(model, folder)
    else:
        model = adapters.adapt_model(experiment, model, folder)
        model = {**model, **model_classes.describe(experiment, model, prepared.classes)}
    pool.broadcast({"kind": "open", "folder": str(folder), "model": model})
    rows = open_workspace(folder)
    test, train = (
        LabelledRows(rows.y[chosen], rows.sites[chosen] if rows.sites.size else None)
        for chosen in (rows.test_rows, rows.parts)
    )
    return HeldOut(pool, test, train, data_info, prepared.classes) if len(rows.test_rows) else None


def _data(experiment: Experiment, place: Place, notices: list[str]) -> dict[str, Any] | None:
    """Description of the data; with a notice, if only the devices have it: its data schema if the experiment has one, or None."""
    data = experiment.data
    if (problem := dataset_name_problem(data.loaded_as)) is None:
        try:
            data_info = load_data(experiment, place.folder, place.pool, place.settings.data_dir, quotes=False)
        except UserError as error:
            if not data.is_described or experiment.evaluation.sample is not None:
                raise
            problem = str(error)
        else:
            if data_info["task"] == "regression":
                notices.append(
                    "labels are scaled by the mean and deviation of the coordinator's own training rows, on all devices"
                )
            _require_described(experiment, data_info)
            notices.append(
                f"test figures are of the coordinator's own held-out rows of {data.dataset!r} (seed {experiment.data_seed}); a test "
                "only where no device trains on them"
            )
            return {
                key: data_info[key]
                for key in ("fingerprint", *MODEL_KEYS, "ids", "preview", "site_names", "schema")
            }
    notices.append(
        f"data.dataset = {data.dataset!r}: the coordinator has no rows of its own to score the model on ({problem})"
    )
    if (schema := data.read_schema()) is None:
        return None
    return {**data.described_shape, "schema": json.loads(schema.to_json())}


def _require_described(experiment: Experiment, data_info: Mapping[str, Any]) -> None:
    for key in MODEL_KEYS:
        declared = getattr(experiment.data, key)
        if declared is not None and declared != data_info[key]:
            raise UserError(f"data.{key} = {declared!r}, but the data set has {data_info[key]!r}")


def _shape(experiment: Experiment, data_info: Mapping[str, Any] | None) -> dict[str, Any]:
    return (
        experiment.data.described_shape if data_info is None else {key: data_info[key] for key in MODEL_KEYS}
    )


def _artifact(
    experiment: Experiment, model: Mapping[str, Any], place: Place, notices: list[str]
) -> tuple[BlobRef, BlobRef] | None:
    """The `.tflite` and its manifest as blobs; None, with a notice, if the export fails and there are other runtimes."""
    cache = _cache(experiment, place)
    try:
        exported = export_model(experiment, model, cache, policy.launch(place.settings, place.folder, cache))
    except UserError as error:
        if experiment.federation.runtimes.keys() == {"litert"}:
            raise
        notices.append(f"no LiteRT device takes part: {error}")
        return None
    tflite, manifest = (
        BlobRef(place.blobs.put(content), len(content))
        for content in (read_regular(exported.tflite), read_regular(exported.manifest))
    )
    return tflite, manifest


def _cache(experiment: Experiment, place: Place) -> Path:
    """The folder of converted artifacts: shared for models of the catalog, else private to the run.

    Code that converts a model can write to the folder, and could change what other runs read there.
    """
    if request_cache.is_ours(experiment.model.name or ""):
        return default_cache_dir()
    return place.folder / "artifacts"


def _runtimes_with_backbone(
    runtimes: tuple[RuntimeName, ...], adapt: str, notices: list[str]
) -> tuple[RuntimeName, ...]:
    """The runtimes whose devices get the backbone: only the LiteRT artifact contains it.

    Raises:
        UserError: LiteRT is not among them.
    """
    if "litert" not in runtimes:
        raise UserError(
            f"model.adapt = {adapt!r}: devices get the frozen backbone with the LiteRT artifact; "
            "allow litert in federation.runtimes"
        )
    return _runtimes_of_artifact(f"model.adapt = {adapt!r}", runtimes, notices)


def _runtimes_of_artifact(
    setting: str, runtimes: tuple[RuntimeName, ...], notices: list[str]
) -> tuple[RuntimeName, ...]:
    """LiteRT alone, with a notice if other runtimes were allowed: the artifact has what `setting` says."""
    if len(runtimes) > 1:
        notices.append(f"{setting}: only LiteRT devices take part, whose artifact holds it")
    return ("litert",)
