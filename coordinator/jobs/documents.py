"""The document of a job: the file of the command that does the same, checked before anything starts.

| kind          | document                                                                               |
|---------------|----------------------------------------------------------------------------------------|
| `simulation`  | an experiment, as of `fedloop simulate`                                                |
| `pretraining` | a configuration of `fedloop pretrain`                                                  |
| `plan`        | the same, with a table `planner`                                                       |
| `compression` | a pipeline of `fedloop compress`, with tables `student`, `data`, `model`               |
| `export`      | the options of `fedloop export`: `name`, `version`, …, with tables `data`, `model`     |

Whoever may start a job has no account on the coordinator's machine. So a document names no code, only models of the catalog and
data sets by name, and only files in the coordinator's data folders (`coordinator.runs.admission`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from coordinator.context.services import Services
from coordinator.datacenter import compression_request, pretrain_config
from coordinator.datacenter.compression_pipeline import PIPELINE_KEYS, PRECISIONS
from coordinator.datacenter.compression_request import CompressionRequest
from coordinator.datacenter.training_data import (
    LEARNT,
    TOKENS,
    DataOptions,
    TrainingData,
    names_tokenizer,
    parse_data_options,
)
from coordinator.document_checks import Section, read_table, to_user_error
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.experiments.by_strategy import architectures
from coordinator.jobs.tables import Kind
from coordinator.model_references import is_version
from coordinator.runs import admission
from coordinator.settings import Settings
from coordinator.storage.private_folders import private_folder
from coordinator.toml_files import absolute
from models import options, user_code
from models.datasets import names
from models.datasets.token_files.directory import HEADER, TOKENIZER
from models.hugging_face import config as hugging_face
from models.hugging_face.config import CONFIG
from models.pretrain.parameter_server.settings import Servers

INIT = "init.safetensors"
"""File in a job's folder: the params of the registered version that `model.init` names."""
INIT_FOLDER = "init"
"""Folder in a job's folder: such a version that is a folder of Hugging Face."""
_STARTED: tuple[Kind, ...] = ("simulation", "pretraining", "plan")
"""Kinds that start from the model that `model.init` names: a version, a file or a folder."""


class Export(Section):
    """The document of an export; see `fedloop export --help`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    version: Annotated[int, Field(ge=1, lt=1_000_000_000)] = 1
    precision: str | None = None
    device_class: list[str] = Field(default_factory=list)
    dataset: str = ""
    real_rows: Annotated[int, Field(ge=0, le=1024)] = 0
    max_accuracy_drop: Annotated[float, Field(ge=0, le=1)] | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)

    def data_options(self) -> DataOptions:
        """The tables `data` and `model`. Raises: UserError: listing every problem of them."""
        tables = {key: table for key, table in (("data", self.data), ("model", self.model)) if table}
        return parse_data_options(None, tables, "export")


@dataclass(frozen=True)
class Checked:
    """A valid document.

    Attributes:
        document: with every default filled in, where the command's own file has that form.
        processes: that the job needs at the same time.
        code: key -> name that would be code if it were not of the catalog.
        files: keys that name a file, with the file.
        init: files of a registered version, by the paths that they have in the job's folder.
    """

    name: str
    document: dict[str, Any]
    processes: int = 1
    code: Sequence[tuple[str, str | None]] = ()
    files: Sequence[tuple[str, str | None]] = ()
    init: Mapping[str, Path] = field(default_factory=dict)


def check(
    kind: Kind, document: Mapping[str, Any], sets: Sequence[str], folder: Path, services: Services
) -> Checked:
    """The document after `--set key=value` settings, for a job in `folder`.

    Raises:
        UserError: listing every problem; `code_not_allowed`, `path_not_allowed`, `bad_file`, `no_params`.
        Refusal: 404, `model.init` names a version that does not exist.
    """
    changed = experiments.apply_settings(dict(document), sets)
    init: dict[str, Path] = {}
    if kind in _STARTED:
        changed, init = _with_init(kind, changed, folder, services)
    checked = replace(_CHECKS[kind](changed), init=init)
    for key, name in checked.code:
        if name is not None and (names.is_code(name) or user_code.is_own(name.partition("(")[0])):
            raise UserError(
                f"{key} = {name!r} is code or a file of your own, and jobs of the API run none, because they run beside the "
                "coordinator; run the command itself on a machine of yours, or have it installed as an entry point of the "
                "group fedloop.models",
                "code_not_allowed",
            )
    _require_files(kind, checked, folder, services.settings)
    return checked


def recheck(kind: Kind, document: Mapping[str, Any], folder: Path, settings: Settings) -> None:
    """Requires that the files of a checked document may still be read, before the job in `folder` starts or goes on.

    Raises:
        UserError: `path_not_allowed`, `bad_file`.
    """
    _require_files(kind, _CHECKS[kind](dict(document)), folder, settings)


def _require_files(kind: Kind, checked: Checked, folder: Path, settings: Settings) -> None:
    for key, path in checked.files:
        if path is None or path in (str(folder / INIT), str(folder / INIT_FOLDER)):
            continue
        if key == "model.init" and kind in _STARTED:
            admission.require_model(key, path, settings)
        else:
            admission.open_file(key, path, settings).close()


def read_compression(document: Mapping[str, Any]) -> CompressionRequest:
    """The compression that a document requests. Raises: UserError: listing every problem."""
    pipeline = {key: value for key, value in document.items() if key in PIPELINE_KEYS}
    settings = {key: value for key, value in document.items() if key not in pipeline}
    return compression_request.read_request(pipeline, settings, "compression")


def read_export(document: Mapping[str, Any]) -> Export:
    """The export that a document requests. Raises: UserError: listing every problem."""
    problems: list[str] = []
    found = read_table(Export, document, problems)
    if found is not None and found.precision not in (None, *PRECISIONS):
        problems.append(f"precision = {found.precision!r} is unknown; known: {', '.join(PRECISIONS)}")
    if found is None or problems:
        raise to_user_error("export", problems)
    return found


def _with_init(
    kind: Kind, document: dict[str, Any], folder: Path, services: Services
) -> tuple[dict[str, Any], dict[str, Path]]:
    """The document with the model that `model.init` names, and files to place in the job's folder.

    A registered version is replaced by its place in the job's folder; what is no version must be readable, and a folder
    gives the model's name and options.
    """
    model = document.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(init, str):
        return document, {}
    if not is_version(init):
        admission.require_model("model.init", absolute(init), services.settings)
        return _with_architecture(kind, document), {}
    files = admission.published_files(init, services)
    with private_folder() as scratch:
        if CONFIG in files:
            shutil.copyfile(files[CONFIG], scratch / CONFIG)
        if hugging_face.is_covered(scratch):
            try:
                found = _with_architecture(kind, {**document, "model": {**model, "init": str(scratch)}})
            except UserError as error:
                raise UserError(str(error).replace(str(scratch), init), error.code) from None
            own = {**found["model"], "init": str(folder / INIT_FOLDER)}
            return {**found, "model": own}, {f"{INIT_FOLDER}/{name}": path for name, path in files.items()}
    own = {**model, "init": str(folder / INIT)}
    return {**document, "model": own}, {INIT: admission.params_file(init, services)}


def _with_architecture(kind: Kind, document: dict[str, Any]) -> dict[str, Any]:
    """The document with the model of the folder that `model.init` names, if it names one."""
    if kind == "simulation":
        return experiments.with_start(document)
    return pretrain_config.with_architecture(document)


def _simulation(document: dict[str, Any]) -> Checked:
    experiment = experiments.resolve(document, "experiment")
    workers = experiment.simulation.workers or 1
    resolved = experiment.model_dump(mode="json", exclude_none=True)
    resolved["simulation"]["workers"] = workers
    named = (
        ("model.name", experiment.model.name),
        ("data.dataset", experiment.data.dataset),
        ("strategy.name", experiment.strategy.name),
        ("server_data.dataset", experiment.server_data.dataset),
        *(("strategy.classes", model["name"]) for model in architectures.classes_of(experiment).values()),
    )
    simulated = experiment.simulation
    files = [
        *admission.named_files(experiment),
        ("simulation.profiles", simulated.profiles),
        ("simulation.replay", simulated.replay),
        ("server_data.path", experiment.server_data.path),
    ]
    return Checked(experiment.name, resolved, workers, named, files)


def _pretraining(document: dict[str, Any]) -> Checked:
    config = pretrain_config.resolve(document, "pretraining")
    if (config.profile or {}).get("folder", "profile") != "profile":
        raise UserError(
            "profile.folder: a job's profile is in its own folder; remove the key", "path_not_allowed"
        )
    processes = config.parallel_plan.processes
    if config.server is not None:
        processes = options.read(Servers, config.server, "server").processes
    named = (("model.name", config.model.name), ("data.dataset", config.data.dataset))
    files = (*_data_files(config.data), ("model.init", config.model.init))
    return Checked(config.name, config.model_dump(mode="json", exclude_none=True), processes, named, files)


def _plan(document: dict[str, Any]) -> Checked:
    planner = document.pop("planner", {})
    planner = {"processes": 2, **planner} if isinstance(planner, dict) else {}
    processes = planner.get("processes")
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise UserError(f"planner.processes = {processes!r}: expected a number of processes, 1 or more")
    if "profile" in planner:
        raise UserError(
            "planner.profile names a file of the coordinator's machine; remove the key", "path_not_allowed"
        )
    checked = _pretraining(document)
    started = min(processes, len(os.sched_getaffinity(0)))
    return replace(
        checked, document={**checked.document, "planner": planner}, processes=max(started, checked.processes)
    )


def _compression(document: dict[str, Any]) -> Checked:
    request = read_compression(document)
    steps = request.pipeline.step
    if any("teachers" in step for step in (*steps, *request.sets.values())):
        raise UserError(
            "distil.teachers names folders of the coordinator's machine, which jobs do not read; leave it out, and the source "
            "is the teacher",
            "path_not_allowed",
        )
    students = [str(step["student"]) for step in (*steps, *request.sets.values()) if "student" in step]
    named = [("student.name", request.student.name), *(("distil.student", each) for each in students)]
    data, files = _data_names(request.data_options)
    return Checked("compressed", document, code=[*named, *data], files=files)


def _export(document: dict[str, Any]) -> Checked:
    export = read_export(document)
    code, files = _data_names(export.data_options())
    return Checked(export.name, export.model_dump(mode="json"), code=code, files=files)


_Named = list[tuple[str, str | None]]


def _data_names(given: DataOptions) -> tuple[_Named, _Named]:
    """What the tables `data` and `model` name: possible code, and files."""
    data, model = given.data, given.model
    return (
        [("model.name", model.name), ("data.dataset", data.dataset if data else None)],
        [*(_data_files(data) if data else ()), ("model.init", model.init)],
    )


def _data_files(data: TrainingData) -> _Named:
    """The file that `data.path` names; of a folder of token files its header, by which the other files are found and checked. And the tokenizer of a text."""
    is_folder = data.dataset == TOKENS and data.path is not None
    path = str(Path(data.path or "") / HEADER) if is_folder else data.path
    encoding = data.encoding or ""
    if data.dataset not in LEARNT or not names_tokenizer(encoding):
        return [("data.path", path)]
    is_file = Path(encoding).suffix == ".json"
    return [("data.path", path), ("data.encoding", encoding if is_file else str(Path(encoding) / TOKENIZER))]


_CHECKS: Mapping[Kind, Callable[[dict[str, Any]], Checked]] = {
    "simulation": _simulation,
    "pretraining": _pretraining,
    "plan": _plan,
    "compression": _compression,
    "export": _export,
}
