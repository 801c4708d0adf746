"""The kinds of versions: the files of each, and what is read from them.

    params      output of `fedloop pretrain`, `simulate` or `run`: model.safetensors, and lineage.json or report.json; of a
                run whose model came as content also that artifact and its manifest, own-model.tflite and own-model.json
    compressed  output of `fedloop compress`: model.safetensors, model.tflite and packed.safetensors if there are such, and
                lineage.json
    inference   a release folder: manifest.json, model.tflite and the report of its export
    weights     imported safetensors: one file, or a Hugging Face folder with config.json
    tflite      an imported .tflite
    onnx        an imported model.onnx, with external weight files and its description onnx.json; as a model of the
                catalog it has model.safetensors and model.json too

The documents of the first three and onnx.json state, by hash, their files and what these were made from. `examine` verifies
all of it, and refuses a folder whose files do not match its own documents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal, get_args

from coordinator.db.registry import FileRow, Input, NewVersion, Relation
from coordinator.errors import UserError
from coordinator.experiments.personalisation import LOCAL_STRATEGIES, NO_MODEL
from coordinator.model_references import HF_INDEX, PARAMS, check_sha256
from coordinator.registry.contents import (
    Contents,
    about_tensors,
    document,
    figures,
    identity,
    require_matching_suffix,
    require_tflite,
    tensors,
)
from coordinator.registry.onnx_structure import external_files
from coordinator.reports.metrics import HEADLINE, REGRESSION
from edge_client.wire import inference
from edge_client.wire.arrays import Header
from edge_client.wire.inference import InferenceManifest
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME
from edge_client.wire.strict import abbreviate, is_text

Kind = Literal["params", "compressed", "inference", "weights", "tflite", "onnx"]
KINDS: tuple[Kind, ...] = get_args(Kind)

LINEAGE, REPORT, MODEL = "lineage.json", "report.json", "model.json"
PACKED = "packed.safetensors"
"""The params of a step `gptq` in few bits, in `models.compress.quantization.packed`'s format."""
ONNX, ONNX_ABOUT = "model.onnx", "onnx.json"
HF_CONFIG = "config.json"
DOCUMENTS = (
    LINEAGE,
    REPORT,
    MODEL,
    "config.toml",
    "pipeline.toml",
    "experiment.toml",
    "schema.json",
    "rounds.csv",
    "curves.png",
    "pareto.png",
)
"""What pretrain, simulate, run and compress write beside their model."""

OWN_FILES = {"artifact": "own-model.tflite", "manifest": "own-model.json"}
"""Training artifact and manifest of a user's own model that came with a run as content; `made_from` of model.json has the hashes."""

FILES: Mapping[Kind, tuple[str, ...]] = {
    "params": (PARAMS, *DOCUMENTS, *OWN_FILES.values()),
    "compressed": (PARAMS, MODEL_NAME, PACKED, *DOCUMENTS),
    "inference": (MANIFEST_NAME, MODEL_NAME, REPORT),
    "weights": (HF_CONFIG, HF_INDEX),
    "tflite": (MODEL_NAME,),
    "onnx": (ONNX, ONNX_ABOUT, PARAMS, MODEL),
}
"""Files that versions of each kind may have; `weights` also any safetensors, `onnx` also its external weight files."""

_MODEL_KEYS = ("name", "options", "input_shape", "classes", "input_dtype", "task", "precision", "made_from")
_ONNX_KEYS = ("ir_version", "opset", "producer", "inputs", "outputs")
_LINEAGE_KEYS = ("config_sha256", "seed", "code_version")


def examine(kind: Kind, contents: Contents) -> NewVersion:
    """Verifies these files, and reads the version to register from them.

    Raises:
        UserError: `missing_file`, `extra_file`, `bad_document`, `bad_file`, or `hash_mismatch`: a file is not the one
            that the documents name.
    """
    stage, inputs, metrics, about = _READERS[kind](contents)
    _require_named(kind, contents)
    _require_plain(about, "about")
    _require_plain(metrics, "metrics")
    return NewVersion(
        kind,
        stage,
        identity(kind, contents),
        about,
        [FileRow(path, file.sha256, file.size_bytes) for path, file in sorted(contents.items())],
        inputs,
        {name: values for name, values in metrics.items() if values},
    )


def is_compression(lineage: Mapping[str, Any]) -> bool:
    """Whether lineage.json is that of a compression, whose parent has its own lineage."""
    return "model_sha256" in _table(lineage, "parent")


def read_manifest(contents: Contents) -> InferenceManifest:
    """The manifest of a release folder. Raises: UserError: `missing_file`, `bad_document`."""
    document(contents, MANIFEST_NAME)  # checks its size, and that no key is duplicated
    try:
        return inference.from_json(contents[MANIFEST_NAME].place.read_bytes(), MANIFEST_NAME)
    except ManifestError as error:
        raise UserError(str(error), "bad_document") from None


_Description = tuple[str, list[Input], dict[str, dict[str, float]], dict[str, Any]]
"""Stage, inputs, metrics, about."""


def _params(contents: Contents) -> _Description:
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
    metrics = figures(final, "test_accuracy", "test_loss", "parameters", "bytes")
    metrics |= figures(_table(final, "metrics"), *REGRESSION)
    origin = {key: lineage[key] for key in _LINEAGE_KEYS if key in lineage}
    return (
        "pretrain",
        inputs,
        {"pretrain": metrics},
        {"model": model, **origin, **about_tensors({PARAMS: header})},
    )


def _of_run(contents: Contents, header: Header) -> _Description:
    """The output of a federated run or a simulation, which report.json describes."""
    if REPORT not in contents:
        raise UserError(
            f"neither {LINEAGE} nor {REPORT} is there to document the origin of {PARAMS}; "
            "import weights from elsewhere: fedloop model import",
            "missing_file",
        )
    report = document(contents, REPORT)
    final, experiment = _table(report, "final"), _table(report, "experiment")
    _require_hash(contents, PARAMS, REPORT, "final.model_sha256", final.get("model_sha256"))
    if (strategy := _table(experiment, "strategy").get("name")) in LOCAL_STRATEGIES:
        raise UserError(f"{REPORT}: strategy.name = {strategy!r}: {NO_MODEL}", "local_tensors")
    inputs = [*_input("data", _table(report, "data").get("fingerprint"))]
    run = report.get("run")
    if run is not None:
        if not re.fullmatch("[0-9a-f-]{36}", str(run)):
            raise UserError(f"{REPORT}: run is {abbreviate(run)}, expected the id of a run", "bad_document")
        inputs.append(Input("run", str(run)))
    rounds = report.get("rounds")
    metrics = figures(final, "test_accuracy", "test_loss", "test_rows")
    metrics |= figures(_table(final, "metrics"), *HEADLINE, *REGRESSION)
    metrics |= figures(report, "clients", "bytes_up", "bytes_down")
    if isinstance(rounds, list):
        metrics["rounds"] = len(rounds)
    about = {"model": _described(contents) or _table(experiment, "model"), "seed": experiment.get("seed")}
    return "run", inputs, {"run": metrics}, {**about, **about_tensors({PARAMS: header})}


def _compressed(contents: Contents) -> _Description:
    lineage = document(contents, LINEAGE)
    parent = _table(lineage, "parent")
    header = tensors(contents, PARAMS)
    _require_hash(contents, PARAMS, LINEAGE, "model_sha256", lineage.get("model_sha256"))
    if MODEL_NAME in contents or lineage.get("tflite_sha256") is not None:
        require_tflite(contents, MODEL_NAME)
        _require_hash(contents, MODEL_NAME, LINEAGE, "tflite_sha256", lineage.get("tflite_sha256"))
    if PACKED in contents or lineage.get("packed_sha256") is not None:
        tensors(contents, PACKED)
        _require_hash(contents, PACKED, LINEAGE, "packed_sha256", lineage.get("packed_sha256"))
    inputs = [*_input("params", parent.get("model_sha256"))]
    # The rows of the compression's training or calibration, and the data set of the parent's training.
    for source in (lineage, parent):
        inputs += _input("data", source.get("data_fingerprint"))
    report = document(contents, REPORT) if REPORT in contents else {}
    origin = {key: lineage[key] for key in _LINEAGE_KEYS if key in lineage}
    about = {"model": _described(contents), **origin, **about_tensors({PARAMS: header})}
    return "compress", inputs, _stages(report), about


def _inference(contents: Contents) -> _Description:
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
        metrics |= figures(report, "accuracy", "r2")
        inputs += _input("params", _table(report, "source").get("tflite_sha256"))
    about = {
        "model": {"name": manifest.architecture, "options": dict(manifest.options)},
        "precision": manifest.precision,
        "runtimes": list(manifest.runtimes),
        "device_classes": list(manifest.device_classes),
        "code_version": manifest.lineage.code_version,
    }
    return "release", inputs, {"release": metrics}, about


def _weights(contents: Contents) -> _Description:
    paths = sorted(path for path in contents if path.endswith(".safetensors"))
    if not paths:
        raise UserError("there is no .safetensors file", "missing_file")
    headers = {path: tensors(contents, path) for path in paths}
    _require_unique_names(headers)
    if HF_INDEX in contents:
        _require_index(document(contents, HF_INDEX), headers)
    elif len(paths) > 1:
        raise UserError(
            f"{len(paths)} .safetensors files without {HF_INDEX}, which maps tensors to files", "missing_file"
        )
    about: dict[str, Any] = {"model": {}}
    if HF_CONFIG in contents:
        config = document(contents, HF_CONFIG)
        about["model"] = {key: config[key] for key in ("model_type", "architectures") if key in config}
    counts = about_tensors(headers)
    size = sum(contents[path].size_bytes for path in paths)
    return "import", [], {"import": {"parameters": counts["parameters"], "bytes": size}}, about | counts


def _tflite(contents: Contents) -> _Description:
    require_tflite(contents, MODEL_NAME)
    return "import", [], {"import": {"bytes": contents[MODEL_NAME].size_bytes}}, {"model": {}}


def _onnx(contents: Contents) -> _Description:
    description = document(contents, ONNX_ABOUT)
    _require_hash(contents, ONNX, ONNX_ABOUT, "sha256", description.get("sha256"))
    external = _table(description, "external")
    if external.keys() != (actual := external_files(contents, ONNX)):
        raise UserError(
            f"{ONNX} has weights in {', '.join(sorted(actual))[:200] or 'no other file'}, but {ONNX_ABOUT} names "
            f"{', '.join(sorted(external))[:200] or 'none'}",
            "bad_file",
        )
    for path, expected in external.items():
        _require_hash(contents, path, ONNX_ABOUT, "external", expected)
    about: dict[str, Any] = {
        "model": _described(contents),
        **{key: description[key] for key in _ONNX_KEYS if key in description},
    }
    metrics: dict[str, float] = {"bytes": sum(contents[path].size_bytes for path in (ONNX, *external))}
    if PARAMS in contents:
        _require_hash(contents, PARAMS, ONNX_ABOUT, "params_sha256", description.get("params_sha256"))
        about |= about_tensors({PARAMS: tensors(contents, PARAMS)})
        metrics["parameters"] = about["parameters"]
    return "import", [], {"import": metrics}, about


_READERS: Mapping[Kind, Callable[[Contents], _Description]] = {
    "params": _params,
    "compressed": _compressed,
    "inference": _inference,
    "weights": _weights,
    "tflite": _tflite,
    "onnx": _onnx,
}


def _require_named(kind: Kind, contents: Contents) -> None:
    """Refuses files that do not belong to this kind, such as a pickle beside safetensors, or whose format does not match
    their names. Files that are read have further checks.
    """
    named = set(FILES[kind])
    if kind == "onnx":
        named |= _table(document(contents, ONNX_ABOUT), "external").keys()
    for path in contents:
        if path in DOCUMENTS:
            require_matching_suffix(contents, path)
        if path not in named and not (kind == "weights" and path.endswith(".safetensors")):
            raise UserError(
                f"{path[:100]} does not belong to a version of kind {kind}, which has: {', '.join(sorted(named))}"
                f"{' and .safetensors files' if kind == 'weights' else ''}; leave it out",
                "extra_file",
            )


def _require_hash(contents: Contents, path: str, source: str, key: str, expected: object) -> None:
    if path not in contents:
        raise UserError(f"{path} is missing", "missing_file")
    actual = contents[path].sha256
    if actual != expected:
        raise UserError(
            f"{path} has the hash {actual}, but {source} says {key} is {str(expected)[:64]}; one of them was replaced",
            "hash_mismatch",
        )


def _require_unique_names(headers: Mapping[str, Header]) -> None:
    seen: dict[str, str] = {}
    for path, header in headers.items():
        for name in header.tensors:
            if name in seen:
                raise UserError(f"tensor {name[:100]!r} is in {seen[name]} and in {path}", "bad_file")
            seen[name] = path


def _require_index(index: Mapping[str, Any], headers: Mapping[str, Header]) -> None:
    """Requires that the index of a sharded model maps every tensor to the file that contains it."""
    listed = index.get("weight_map")
    if not isinstance(listed, dict):
        raise UserError(f"{HF_INDEX} has no weight_map", "bad_document")
    actual = {name: path for path, header in headers.items() for name in header.tensors}
    if listed != actual:
        wrong = min(name for name in listed.keys() | actual.keys() if listed.get(name) != actual.get(name))
        raise UserError(
            f"{HF_INDEX} says tensor {wrong[:100]!r} is in {str(listed.get(wrong))[:100]}; it is in {actual.get(wrong)}",
            "hash_mismatch",
        )


def _described(contents: Contents) -> dict[str, Any]:
    """The model's description from model.json, which must name the files of a user's own model."""
    own = {name: path for name, path in OWN_FILES.items() if path in contents}
    if MODEL not in contents and not own:
        return {}
    model = document(contents, MODEL)
    for name, path in own.items():
        key = f"{name}_sha256"
        _require_hash(contents, path, MODEL, f"made_from.{key}", _table(model, "made_from").get(key))
    if PARAMS in contents and model.get("sha256") is not None:
        _require_hash(contents, PARAMS, MODEL, "sha256", model["sha256"])
    return {key: model[key] for key in _MODEL_KEYS if key in model}


def _input(relation: Relation, ref: object) -> list[Input]:
    """The input with this hash; empty if the document has none."""
    if ref is None or ref == "":
        return []
    return [Input(relation, check_sha256(str(ref)))]


def _table(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _stages(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Figures of every stage that a compression reports: its source, its steps by name, and its result."""
    stages = {name: figures(_table(report, name)) for name in ("source", "final")}
    steps = report.get("steps")
    for row in steps if isinstance(steps, list) else ():
        if isinstance(row, dict):
            stages[str(row.get("name"))[:40]] = figures(row)
    return stages


def _require_plain(value: Any, place: str) -> None:
    """Refuses values that JSON can express but a database or a response cannot: NUL, lone surrogates, NaN."""
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
        raise UserError(f"{place} holds {abbreviate(value)}, which cannot be stored", "bad_document")
