"""ONNX, to and from the registry: the command line's side. All that opens or makes such a file is a process of its own.

export     model.json and model.safetensors of a version ─► model.onnx, answers as PyTorch does
imported   model.onnx, files of weights beside it ─► kind `onnx`; with a model's name its params too
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator import experiment, jobs, parts
from coordinator.errors import RunInterrupted, UserError
from coordinator.jobs import Job, JobFailed
from coordinator.operator_client import OperatorClient
from coordinator.registry import transfer
from coordinator.registry.contents import Content, content_of
from coordinator.registry.folders import Gathered
from coordinator.registry.kinds import MODEL, ONNX, ONNX_ABOUT, PARAMS
from coordinator.registry.references import file_path
from coordinator.sections import model_problems, wrong
from edge_client.files import make_durably, write_durably
from models import catalog

_OWN = (ONNX, ONNX_ABOUT, PARAMS, MODEL)
_MODEL_KEYS = ("name", "options", "input_shape", "classes", "input_dtype", "task")

Sent = Callable[[int], None]


def exported_files(version: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two files of a version that its ONNX file is made of, as the API shows them.

    Raises:
        UserError: the version has not both, or is of a model that is not in the catalog.
    """
    files = [file for file in version["files"] if file["path"] in (MODEL, PARAMS)]
    if len(files) != 2:
        raise UserError(
            f"--format onnx: {version['version']} is {version['kind']} of stage {version['stage']} and has no "
            f"{PARAMS} with a {MODEL}; a version that came of pretrain, run or compress has them"
        )
    name = version["about"].get("model", {}).get("name")
    if name not in catalog.MODELS:
        raise UserError(
            f"--format onnx: {version['version']} is of model {str(name)[:100]!r}, whose code may be run where it is "
            f"yours only; expected one of the catalog: {', '.join(catalog.MODELS)}"
        )
    return files


def export(client: OperatorClient, version: Mapping[str, Any], out: Path, got: Sent) -> dict[str, Any]:
    """Makes `model.onnx` of a version in the new or empty folder `out`, with `onnx.json` that tells of it; that document.

    Raises:
        UserError: the version cannot be one, a package is missing, or `out` is not empty or not writable.
        RunInterrupted: torch cannot follow the model, or the file answered otherwise, and was not kept.
    """
    _require_packages()
    transfer.require_new(out)
    with tempfile.TemporaryDirectory(prefix="fedloop-") as scratch:
        source, work = Path(scratch) / "source", Path(scratch) / "work"
        transfer.export(client, {**version, "files": exported_files(version)}, source, got)
        model = json.loads((source / MODEL).read_text("utf-8"))
        described = {key: model[key] for key in _MODEL_KEYS if key in model}
        try:
            about = jobs.run(Job("onnx-export", described, {}, params=source / PARAMS), work)
        except JobFailed as error:
            raise RunInterrupted(f"{version['version']} cannot be an ONNX file: {error.reason}") from None
        params = next(file["sha256"] for file in version["files"] if file["path"] == PARAMS)
        about = {"version": version["version"], "params_sha256": params, "model": described, **about}
        try:
            out.mkdir(parents=True, exist_ok=True)
            make_durably(out / ONNX, lambda place: shutil.copyfile(work / ONNX, place))
            write_durably(out / ONNX_ABOUT, _json(about))
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    return about


def imported(path: Path, model: str | None, options: Sequence[str], scratch: Path) -> Gathered:
    """The kind and the files of the ONNX file at `path`, which was checked; what was made of it lies in `scratch`.

    Args:
        model: of the catalog, whose params the file's weights are to be, by name and shape.
        options: of that model, `key=value`.

    Raises:
        UserError: the file is broken, or reaches beyond its folder, or does not fit the model; all that is wrong is named.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    wanted = _wanted(model, options)
    _require_packages()
    job = Job("onnx-import", wanted, {}, more={"onnx": str(path.absolute())})
    try:
        result = jobs.run(job, scratch)
    except JobFailed as error:
        reason = error.reason
        if "SIGXCPU" in reason:
            reason = "to look at it took all the processor time that a file is given"
        raise UserError(f"{path}: {reason}", "bad_file") from None
    contents: dict[str, Content] = {ONNX: content_of(path)}
    for location in result["external"]:
        _require_name(location, path)
        contents[location] = content_of(path.parent / location)
    if "params_sha256" in result:
        write_durably(scratch / MODEL, _json({**result["model"], "sha256": result["params_sha256"]}))
        contents |= {name: content_of(scratch / name) for name in (PARAMS, MODEL)}
    write_durably(scratch / ONNX_ABOUT, _json(result))
    contents[ONNX_ABOUT] = content_of(scratch / ONNX_ABOUT)
    return "onnx", contents


def _require_name(location: str, path: Path) -> None:
    """Refuses the name of a file with weights that no file of a version can have beside ours."""
    try:
        taken = file_path(location) in _OWN
    except UserError as error:
        raise UserError(f"{path}: has weights elsewhere: {error}", error.code) from None
    if taken:
        raise UserError(f"{path}: has weights in {location}, a name that is ours; call that file otherwise")


def _wanted(model: str | None, options: Sequence[str]) -> dict[str, Any]:
    """The model that is named, with all its options; nothing where none is."""
    if model is None:
        if options:
            raise UserError("--option is of the model that --model names, which is not given")
        return {}
    given = experiment.changed({}, options)
    if ":" in model:
        raise UserError(f"--model {model}: expected one of the catalog: {', '.join(catalog.MODELS)}")
    if problems := list(model_problems(model, given)):
        raise wrong("model import", problems)
    return {"name": model, "options": catalog.MODELS[model].options.model_validate(given).model_dump()}


def _require_packages() -> None:
    if lacking := parts.missing("ONNX"):
        raise UserError(
            f"ONNX needs {', '.join(lacking)}, not installed here; {parts.how_to_install('ONNX')}"
        )


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
