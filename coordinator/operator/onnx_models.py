"""ONNX, to and from the registry. Only a process of its own reads or writes such a file.

export    model.json and model.safetensors of a version ─► model.onnx, verified against PyTorch
gather    model.onnx and files of weights beside it ─► kind `onnx`; with a model's name its params too
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator import extras
from coordinator.datacenter import jobs
from coordinator.datacenter.documents import write_document
from coordinator.datacenter.job_worker import JobFailed
from coordinator.datacenter.jobs import DatacenterJob
from coordinator.document_checks import to_user_error
from coordinator.errors import RunInterrupted, UserError
from coordinator.experiments import experiment
from coordinator.experiments.validation import find_model_problems
from coordinator.model_references import PARAMS, check_file_path
from coordinator.operator import version_export
from coordinator.operator.client import OnBytes, OperatorClient
from coordinator.operator.version_files import Gathered
from coordinator.output_folders import require_new
from coordinator.registry.contents import Content, content_of
from coordinator.registry.kinds import MODEL, ONNX, ONNX_ABOUT
from coordinator.storage.private_folders import private_folder
from edge_client.files import make_durably
from models import catalog
from models.tasks import MODEL_KEYS

_RESERVED_NAMES = (ONNX, ONNX_ABOUT, PARAMS, MODEL)


def source_files(version: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two files of a version that an ONNX file is made from, as the API shows them.

    Raises:
        UserError: the version lacks one, or its model is not in the catalog.
    """
    files = [file for file in version["files"] if file["path"] in (MODEL, PARAMS)]
    if len(files) != 2:
        raise UserError(
            f"--format onnx: {version['version']} is {version['kind']} of stage {version['stage']} and has no "
            f"{PARAMS} with a {MODEL}; versions from pretrain, run or compress have them"
        )
    name = version["about"].get("model", {}).get("name")
    if name not in catalog.MODELS:
        raise UserError(
            f"--format onnx: {version['version']} is of model {str(name)[:100]!r}, whose code may only run on "
            f"its owner's machine; expected one of the catalog: {', '.join(catalog.MODELS)}"
        )
    return files


def export(
    client: OperatorClient, version: Mapping[str, Any], out: Path, on_bytes: OnBytes
) -> dict[str, Any]:
    """Writes `model.onnx` of a version into the new or empty folder `out`, and `onnx.json`, which it returns.

    Raises:
        UserError: the version cannot be exported, a package is missing, or `out` is not empty or not writable.
        RunInterrupted: torch cannot trace the model, or the file answered differently and was not kept.
    """
    _require_packages()
    require_new(out)
    with private_folder() as scratch:
        source, work = scratch / "source", scratch / "work"
        version_export.export(client, {**version, "files": source_files(version)}, source, on_bytes)
        model = json.loads((source / MODEL).read_text("utf-8"))
        definition = {key: model[key] for key in ("name", "options", *MODEL_KEYS) if key in model}
        try:
            about = jobs.run(DatacenterJob("onnx-export", definition, {}, params=source / PARAMS), work)
        except JobFailed as error:
            raise RunInterrupted(f"{version['version']} cannot be exported to ONNX: {error.reason}") from None
        params = next(file["sha256"] for file in version["files"] if file["path"] == PARAMS)
        about = {"version": version["version"], "params_sha256": params, "model": definition, **about}
        try:
            out.mkdir(parents=True, exist_ok=True)
            make_durably(out / ONNX, lambda place: shutil.copyfile(work / ONNX, place))
            write_document(out / ONNX_ABOUT, about)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    return about


def gather(path: Path, model: str | None, options: Sequence[str], scratch: Path) -> Gathered:
    """The kind and the files of the ONNX file at `path`, checked; files made from it lie in `scratch`.

    Args:
        model: of the catalog; the file's weights become its params, by name and shape.
        options: of that model, `key=value`.

    Raises:
        UserError: the file is broken, reaches beyond its folder, or does not fit the model; the message lists every problem.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    definition = _model_definition(model, options)
    _require_packages()
    job = DatacenterJob("onnx-import", definition, {}, more={"onnx": str(path.absolute())})
    try:
        result = jobs.run(job, scratch)
    except JobFailed as error:
        reason = error.reason
        if "SIGXCPU" in reason:
            reason = "checking it exceeded the limit of processor time"
        raise UserError(f"{path}: {reason}", "bad_file") from None
    contents: dict[str, Content] = {ONNX: content_of(path)}
    for location in result["external"]:
        _require_usable_name(location, path)
        contents[location] = content_of(path.parent / location)
    if "params_sha256" in result:
        write_document(scratch / MODEL, {**result["model"], "sha256": result["params_sha256"]})
        contents |= {name: content_of(scratch / name) for name in (PARAMS, MODEL)}
    write_document(scratch / ONNX_ABOUT, result)
    contents[ONNX_ABOUT] = content_of(scratch / ONNX_ABOUT)
    return "onnx", contents


def _require_usable_name(location: str, path: Path) -> None:
    """Refuses a file of weights whose name no file of a version may have."""
    try:
        taken = check_file_path(location) in _RESERVED_NAMES
    except UserError as error:
        raise UserError(f"{path}: has weights elsewhere: {error}", error.code) from None
    if taken:
        raise UserError(f"{path}: has weights in {location}, a reserved name; rename that file")


def _model_definition(model: str | None, options: Sequence[str]) -> dict[str, Any]:
    """The named model with all its options; empty without a name."""
    if model is None:
        if options:
            raise UserError("--option needs --model: it is an option of that model")
        return {}
    changes = experiment.apply_settings({}, options)
    if ":" in model:
        raise UserError(f"--model {model}: expected one of the catalog: {', '.join(catalog.MODELS)}")
    if problems := list(find_model_problems(model, changes)):
        raise to_user_error("model import", problems)
    return {"name": model, "options": catalog.MODELS[model].options.model_validate(changes).model_dump()}


def _require_packages() -> None:
    if lacking := extras.missing("ONNX"):
        raise UserError(
            f"ONNX needs {', '.join(lacking)}, not installed here; {extras.how_to_install('ONNX')}"
        )
