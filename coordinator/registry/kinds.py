"""The kinds of versions: which files each has, and what is read from them.

    params      what `fedloop pretrain`, `simulate` or `run` left: model.safetensors, and lineage.json or report.json
    compressed  what `fedloop compress` left: model.safetensors, model.tflite where there is one, and lineage.json
    inference   a release folder: manifest.json and model.tflite, and what its export reported
    weights     imported safetensors: one file, or a Hugging Face folder with config.json
    tflite      an imported .tflite
    onnx        an imported model.onnx, with files of weights beside it; onnx.json tells of it; as a model of the
                catalog it has model.safetensors and model.json too

The first three and onnx.json say themselves, by hash, what they hold and what they were made from. `examine` believes none of it
before it has compared: a folder whose files are not those its own documents tell of is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal, get_args

from coordinator.db.registry import FileRow, Input, NewVersion, Relation
from coordinator.errors import UserError
from coordinator.registry.contents import (
    Contents,
    about_tensors,
    document,
    figures,
    identity,
    require_tflite,
    require_told,
    tensors,
)
from coordinator.registry.onnx_structure import external_files
from coordinator.registry.references import digest
from edge_client.wire import inference
from edge_client.wire.arrays import Header
from edge_client.wire.inference import MANIFEST_NAME, MODEL_NAME, InferenceManifest
from edge_client.wire.manifest import ManifestError
from edge_client.wire.strict import is_text, shown

Kind = Literal["params", "compressed", "inference", "weights", "tflite", "onnx"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PARAMS, LINEAGE, REPORT, MODEL = "model.safetensors", "lineage.json", "report.json", "model.json"
ONNX, ONNX_ABOUT = "model.onnx", "onnx.json"
HF_CONFIG, HF_INDEX = "config.json", "model.safetensors.index.json"
TOLD = (
    LINEAGE,
    REPORT,
    MODEL,
    "config.toml",
    "pipeline.toml",
    "experiment.toml",
    "rounds.csv",
    "curves.png",
    "pareto.png",
)
"""What pretrain, simulate, run and compress tell of their model beside it."""

FILES: Mapping[Kind, tuple[str, ...]] = {
    "params": (PARAMS, *TOLD),
    "compressed": (PARAMS, MODEL_NAME, *TOLD),
    "inference": (MANIFEST_NAME, MODEL_NAME, REPORT),
    "weights": (HF_CONFIG, HF_INDEX),
    "tflite": (MODEL_NAME,),
    "onnx": (ONNX, ONNX_ABOUT, PARAMS, MODEL),
}
"""What versions of each kind may hold; also `weights` any safetensors, and `onnx` the files that it says its weights are in."""

_MODEL_KEYS = ("name", "options", "input_shape", "classes", "input_dtype", "task", "precision")
_ONNX_KEYS = ("ir_version", "opset", "producer", "inputs", "outputs")
_LINEAGE_KEYS = ("config_sha256", "seed", "code_version")


def examine(kind: Kind, contents: Contents) -> NewVersion:
    """What there is to register of these files.

    Raises:
        UserError: `missing_file`, `extra_file`, `bad_document`, `bad_file`, or `hash_mismatch`: a file is not the one
            that the documents beside it tell of.
    """
    stage, inputs, metrics, about = _READERS[kind](contents)
    _require_named(kind, contents)
    _require_plain(about, "about")
    _require_plain(metrics, "metrics")
    return NewVersion(
        kind,
        stage,
        identity(kind, contents),
        [FileRow(path, file.sha256, file.size_bytes) for path, file in sorted(contents.items())],
        inputs,
        {name: values for name, values in metrics.items() if values},
        about,
    )


def is_compression(lineage: Mapping[str, Any]) -> bool:
    """Whether lineage.json is of a compression: then its parent has a lineage of its own."""
    return "model_sha256" in _table(lineage, "parent")


def read_manifest(contents: Contents) -> InferenceManifest:
    """The manifest of a release folder. Raises: UserError: `missing_file`, `bad_document`."""
    document(contents, MANIFEST_NAME)  # its size, and that no key comes twice
    try:
        return inference.from_json(contents[MANIFEST_NAME].place.read_bytes(), MANIFEST_NAME)
    except ManifestError as error:
        raise UserError(str(error), "bad_document") from None


_Found = tuple[str, list[Input], dict[str, dict[str, float]], dict[str, Any]]
"""Stage, inputs, metrics, about."""


def _params(contents: Contents) -> _Found:
    header = tensors(contents, PARAMS)
    if LINEAGE not in contents:
        return _of_run(contents, header)
    lineage = document(contents, LINEAGE)
    _require_hash(contents, PARAMS, LINEAGE, "model_sha256", lineage.get("model_sha256"))
    model = _described(contents)
    report = document(contents, REPORT) if REPORT in contents else {}
    final = _table(report, "final")
    if report:
        _require_hash(contents, PARAMS, REPORT, "final.model_sha256", final.get("model_sha256"))
    inputs = [*_input("data", lineage.get("data_fingerprint"))]
    inputs += _input("params", _table(lineage, "parent").get("sha256"))
    metrics = {"pretrain": figures(final, "test_accuracy", "test_loss", "parameters", "bytes")}
    told = {key: lineage[key] for key in _LINEAGE_KEYS if key in lineage}
    return "pretrain", inputs, metrics, {"model": model, **told, **about_tensors({PARAMS: header})}


def _of_run(contents: Contents, header: Header) -> _Found:
    """What a federated run or a simulation left, which tells of itself in report.json."""
    if REPORT not in contents:
        raise UserError(
            f"neither {LINEAGE} nor {REPORT} is here to say where {PARAMS} comes from; "
            "weights from elsewhere are imported: fedloop model import",
            "missing_file",
        )
    report = document(contents, REPORT)
    final, experiment = _table(report, "final"), _table(report, "experiment")
    _require_hash(contents, PARAMS, REPORT, "final.model_sha256", final.get("model_sha256"))
    inputs = [*_input("data", _table(report, "data").get("fingerprint"))]
    run = report.get("run")
    if run is not None:
        if not re.fullmatch("[0-9a-f-]{36}", str(run)):
            raise UserError(f"{REPORT}: run is {shown(run)}, expected the id of a run", "bad_document")
        inputs.append(Input("run", str(run)))
    rounds = report.get("rounds")
    metrics = figures(final, "test_accuracy", "test_loss", "test_rows")
    metrics |= figures(report, "clients", "bytes_up", "bytes_down")
    if isinstance(rounds, list):
        metrics["rounds"] = len(rounds)
    about = {"model": _described(contents) or _table(experiment, "model"), "seed": experiment.get("seed")}
    return "run", inputs, {"run": metrics}, {**about, **about_tensors({PARAMS: header})}


def _compressed(contents: Contents) -> _Found:
    lineage = document(contents, LINEAGE)
    parent = _table(lineage, "parent")
    header = tensors(contents, PARAMS)
    _require_hash(contents, PARAMS, LINEAGE, "model_sha256", lineage.get("model_sha256"))
    if MODEL_NAME in contents or lineage.get("tflite_sha256") is not None:
        require_tflite(contents, MODEL_NAME)
        _require_hash(contents, MODEL_NAME, LINEAGE, "tflite_sha256", lineage.get("tflite_sha256"))
    inputs = [*_input("params", parent.get("model_sha256"))]
    # Of the rows that taught or calibrated, and of the whole set that the parent was trained on.
    for source in (lineage, parent):
        inputs += _input("data", source.get("data_fingerprint"))
    report = document(contents, REPORT) if REPORT in contents else {}
    told = {key: lineage[key] for key in _LINEAGE_KEYS if key in lineage}
    about = {"model": _described(contents), **told, **about_tensors({PARAMS: header})}
    return "compress", inputs, _stages(report), about


def _inference(contents: Contents) -> _Found:
    manifest = read_manifest(contents)
    require_tflite(contents, MODEL_NAME)
    _require_hash(contents, MODEL_NAME, MANIFEST_NAME, "file.sha256", manifest.file.sha256)
    inputs = [*_input("params", manifest.params_sha256), *_input("params", manifest.lineage.parent)]
    inputs += _input("data", manifest.lineage.data_fingerprint)
    known = {"bytes": manifest.file.size_bytes, **asdict(manifest)}
    metrics = figures(known, "bytes", "memory_bytes", "arena_bytes")
    if manifest.golden.real_y:
        metrics["least_accuracy"] = manifest.golden.least_accuracy
    if REPORT in contents:
        report = document(contents, REPORT)
        _require_hash(contents, MODEL_NAME, REPORT, "sha256", report.get("sha256"))
        metrics |= figures(report, "accuracy")
        inputs += _input("params", _table(report, "source").get("tflite_sha256"))
    about = {
        "model": {"name": manifest.architecture, "options": dict(manifest.options)},
        "precision": manifest.precision,
        "runtimes": list(manifest.runtimes),
        "device_classes": list(manifest.device_classes),
        "code_version": manifest.lineage.code_version,
    }
    return "release", inputs, {"release": metrics}, about


def _weights(contents: Contents) -> _Found:
    paths = sorted(path for path in contents if path.endswith(".safetensors"))
    if not paths:
        raise UserError("no .safetensors file is here", "missing_file")
    headers = {path: tensors(contents, path) for path in paths}
    _require_no_name_twice(headers)
    if HF_INDEX in contents:
        _require_index(document(contents, HF_INDEX), headers)
    elif len(paths) > 1:
        raise UserError(
            f"{len(paths)} .safetensors files without {HF_INDEX}, which says what lies where", "missing_file"
        )
    about: dict[str, Any] = {"model": {}}
    if HF_CONFIG in contents:
        config = document(contents, HF_CONFIG)
        about["model"] = {key: config[key] for key in ("model_type", "architectures") if key in config}
    counted = about_tensors(headers)
    size = sum(contents[path].size_bytes for path in paths)
    return "import", [], {"import": {"parameters": counted["parameters"], "bytes": size}}, about | counted


def _tflite(contents: Contents) -> _Found:
    require_tflite(contents, MODEL_NAME)
    return "import", [], {"import": {"bytes": contents[MODEL_NAME].size_bytes}}, {"model": {}}


def _onnx(contents: Contents) -> _Found:
    told = document(contents, ONNX_ABOUT)
    _require_hash(contents, ONNX, ONNX_ABOUT, "sha256", told.get("sha256"))
    external = _table(told, "external")
    if external.keys() != (found := external_files(contents, ONNX)):
        raise UserError(
            f"{ONNX} has weights in {', '.join(sorted(found))[:200] or 'no other file'}, and {ONNX_ABOUT} tells of "
            f"{', '.join(sorted(external))[:200] or 'none'}",
            "bad_file",
        )
    for path, expected in external.items():
        _require_hash(contents, path, ONNX_ABOUT, "external", expected)
    about: dict[str, Any] = {
        "model": _described(contents),
        **{key: told[key] for key in _ONNX_KEYS if key in told},
    }
    metrics: dict[str, float] = {"bytes": sum(contents[path].size_bytes for path in (ONNX, *external))}
    if PARAMS in contents:
        _require_hash(contents, PARAMS, ONNX_ABOUT, "params_sha256", told.get("params_sha256"))
        about |= about_tensors({PARAMS: tensors(contents, PARAMS)})
        metrics["parameters"] = about["parameters"]
    return "import", [], {"import": metrics}, about


_READERS: Mapping[Kind, Callable[[Contents], _Found]] = {
    "params": _params,
    "compressed": _compressed,
    "inference": _inference,
    "weights": _weights,
    "tflite": _tflite,
    "onnx": _onnx,
}


def _require_named(kind: Kind, contents: Contents) -> None:
    """Refuses files that a version of this kind does not have, such as a pickle beside safetensors, or that are something
    else than their names say. What is read further has its own checks.
    """
    named = set(FILES[kind])
    if kind == "onnx":
        named |= _table(document(contents, ONNX_ABOUT), "external").keys()
    for path in contents:
        if path in TOLD:
            require_told(contents, path)
        if path not in named and not (kind == "weights" and path.endswith(".safetensors")):
            raise UserError(
                f"{path[:100]} is no file of a version of kind {kind}, which has: {', '.join(sorted(named))}"
                f"{' and files of safetensors' if kind == 'weights' else ''}; leave it out",
                "extra_file",
            )


def _require_hash(contents: Contents, path: str, source: str, key: str, expected: object) -> None:
    if path not in contents:
        raise UserError(f"{path} is missing", "missing_file")
    found = contents[path].sha256
    if found != expected:
        raise UserError(
            f"{path} has the hash {found}, but {source} says {key} is {str(expected)[:64]}; one of them was replaced",
            "hash_mismatch",
        )


def _require_no_name_twice(headers: Mapping[str, Header]) -> None:
    seen: dict[str, str] = {}
    for path, header in headers.items():
        for name in header.tensors:
            if name in seen:
                raise UserError(f"tensor {name[:100]!r} is in {seen[name]} and in {path}", "bad_file")
            seen[name] = path


def _require_index(index: Mapping[str, Any], headers: Mapping[str, Header]) -> None:
    """The index of a sharded model: tensor -> the file it lies in. It must tell of each one, and truly."""
    told = index.get("weight_map")
    if not isinstance(told, dict):
        raise UserError(f"{HF_INDEX} has no weight_map", "bad_document")
    lies = {name: path for path, header in headers.items() for name in header.tensors}
    if told != lies:
        wrong = sorted(name for name in told.keys() | lies.keys() if told.get(name) != lies.get(name))[0]
        raise UserError(
            f"{HF_INDEX} says tensor {wrong[:100]!r} is in {str(told.get(wrong))[:100]}; it is in {lies.get(wrong)}",
            "hash_mismatch",
        )


def _described(contents: Contents) -> dict[str, Any]:
    """What model.json says the model is."""
    if MODEL not in contents:
        return {}
    model = document(contents, MODEL)
    if PARAMS in contents and model.get("sha256") is not None:
        _require_hash(contents, PARAMS, MODEL, "sha256", model["sha256"])
    return {key: model[key] for key in _MODEL_KEYS if key in model}


def _input(relation: Relation, ref: object) -> list[Input]:
    """The input with this hash; none where the document has none."""
    if ref is None or ref == "":
        return []
    return [Input(relation, digest(str(ref)))]


def _table(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _stages(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Figures of every stage that a compression reports: what it began with, its steps by name, what it ended with."""
    found = {name: figures(_table(report, name)) for name in ("source", "final")}
    steps = report.get("steps")
    for row in steps if isinstance(steps, list) else ():
        if isinstance(row, dict):
            found[str(row.get("name"))[:40]] = figures(row)
    return found


def _require_plain(value: Any, place: str) -> None:
    """Refuses what JSON can spell and neither a database nor an answer can hold: NUL, half characters, NaN."""
    if isinstance(value, dict):
        for key, item in value.items():
            _require_plain(key, place)
            _require_plain(item, f"{place}.{key}"[:100])
    elif isinstance(value, list):
        for item in value:
            _require_plain(item, place)
    elif (isinstance(value, str) and not is_text(value)) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise UserError(f"{place} holds {shown(value)}, which cannot be kept", "bad_document")
