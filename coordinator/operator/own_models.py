"""A user's own model, made for a run on devices where the user's code is: built, exported and sent as content.

    1. the shape of the rows: as the experiment describes it, else of the data set, loaded here
    2. build    the model and its initial params, in a worker that runs the user's code
    3. export   the artifact and its manifest, with golden outputs (`models.conversion`)
    4. send     the files that the coordinator lacks, and the experiment with their hashes

The coordinator gets no code, and no path: of a `.keras` file the name and, as the parent in the manifest, the hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coordinator import extras
from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.model_references import PARAMS, is_version
from coordinator.operator.client import OperatorClient
from coordinator.operator.version_files import post_with_files
from coordinator.registry.contents import Content, content_of
from coordinator.reports.progress import Progress
from coordinator.runs.initial_params import read_init
from coordinator.runs.model_setup import export_model, load_data, set_up_model
from coordinator.runs.own_model import require_fit
from coordinator.storage.private_folders import private_folder
from coordinator.workers.pool import TORCH, WorkerPool
from edge_client.files import file_sha256, read_regular, write_durably
from edge_client.wire import arrays, manifest
from models import user_code
from models.tasks import MODEL_KEYS


def submit(
    client: OperatorClient, document: dict[str, Any], experiment: Experiment, progress: Progress
) -> dict[str, Any]:
    """Starts a run of the experiment `document`, with its model, the user's own, as content. Returns the run.

    `experiment`: the document, resolved.

    Raises:
        UserError: the model cannot be built, exported or sent; Refused, Unreachable: from the client.
    """
    name = experiment.model.name or ""
    require_fit(experiment)
    if lacking := extras.missing("export to LiteRT"):
        raise UserError(
            f"model.name = {name!r} is built and exported here, which needs {', '.join(lacking)}, not installed here; "
            f"{extras.how_to_install('export to LiteRT')}"
        )
    if name.endswith(user_code.KERAS_FILE):
        document = {**document, "model": {**document["model"], "name": Path(name).name}}
    with private_folder() as folder:
        contents = _make(client, experiment, folder, progress)
        declared = {
            each: {"sha256": content.sha256, "size_bytes": content.size_bytes}
            for each, content in contents.items()
        }
        request = {"experiment": document, "own_model": declared}
        progress.stage(f"sending the model, {sum(each.size_bytes for each in contents.values()):,} bytes")
        return post_with_files(client, "/runs", request, contents)


def _make(
    client: OperatorClient, experiment: Experiment, folder: Path, progress: Progress
) -> dict[str, Content]:
    """The files of the experiment's model, made in `folder`, by their names in a request."""
    name = experiment.model.name or ""
    # Its one runtime on a fleet: whether the model could also train in others does not matter.
    federation = experiment.federation.model_copy(update={"runtimes": {"litert": 1.0}})
    experiment = experiment.model_copy(update={"federation": federation})
    progress.stage(f"building {name} here")
    with WorkerPool(1, folder / "workers.log", TORCH) as pool:
        shape, ids = _shape(experiment, folder / "data", pool)
        model = experiment.model.describe(shape)
        init = _init(client, experiment, folder)
        _, params, _ = set_up_model(experiment, model, folder, pool, init, ids)
    progress.stage("exporting the model to LiteRT")
    exported = export_model(experiment, model)
    described = manifest.from_json(exported.manifest.read_bytes(), str(exported.manifest))
    if name.endswith(user_code.KERAS_FILE):
        lineage = replace(described.lineage, parent=file_sha256(Path(name)))
        described = replace(described, model=Path(name).name, lineage=lineage)
    write_durably(folder / "manifest.json", described.to_json().encode())
    write_durably(folder / PARAMS, arrays.encode(params))
    places = {"artifact": exported.tflite, "manifest": folder / "manifest.json", "params": folder / PARAMS}
    return {each: content_of(place) for each, place in places.items()}


def _shape(experiment: Experiment, folder: Path, pool: WorkerPool) -> tuple[Mapping[str, Any], int]:
    """The `MODEL_KEYS` of the data, and the number of its token ids, 0 if it has none or they are unknown."""
    if experiment.data.is_described:
        return experiment.data.described_shape, 0
    try:
        data_info = load_data(experiment, folder, pool, None)
    except UserError as error:
        raise UserError(
            f"{error}\nmodel.name = {experiment.model.name!r} is built here, for the shape of the rows; where the data is "
            "not, describe an example with data.input_shape and data.classes"
        ) from None
    return {key: data_info[key] for key in MODEL_KEYS}, data_info.get("ids", 0)


def _init(client: OperatorClient, experiment: Experiment, folder: Path) -> bytes | None:
    """The params that `model.init` names: a file here, or a version of the coordinator's registry."""
    init = experiment.model.init
    if init is None or not is_version(init):
        return read_init(experiment)
    place = folder / "init.safetensors"
    client.fetch(f"/versions/{quote(init, safe='')}/files/{PARAMS}", place, lambda count: None)
    return read_regular(place)
