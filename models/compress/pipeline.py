"""A compression as a sequence of steps, each stored on disk as soon as it is done.

    1. `plan_steps`: the `[[step]]` tables of a pipeline as steps with checked options
    2. `run`: the source is step 0; every further step takes the model of the previous one
    3. a step's folder, `step-01-distil/`: `model.safetensors`, `model.tflite` once there is one, `float32.tflite` to measure
       size and latency of a float model, `packed.safetensors` of a step `gptq`, `model.cc` of a step `micro`, and finally `step.json`

A step's key is the hash of all its inputs: the model before it, the original and the teachers, its options, the data,
its seed, our code and the libraries' versions (but not the code of a user's own model). If the folder already holds that key, the
step does not run again, whether an earlier run was killed or only later steps changed.
Models always pass through their files, so a resumed run gives the same result as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from edge_client.files import sync_folder, write_durably
from models import catalog, options, zoo
from models.compress import report
from models.compress.pruning.structure import rebuild
from models.compress.step import Context, Data, OnProgress, Precision, StepModel, StepRefused
from models.job import read_params
from models.pretrain.params import params_of

STEPS: Mapping[str, str] = {
    "distil": "models.compress.distil:step",
    "prune": "models.compress.pruning.prune:prune",
    "structured": "models.compress.pruning.structured:structured",
    "lowrank": "models.compress.pruning.lowrank:factorise",
    "fold": "models.compress.graph:fold",
    "quantize": "models.compress.quantization.quantize:step",
    "mixed": "models.compress.quantization.sensitivity:mixed",
    "qat": "models.compress.quantization.qat:train",
    "codebook": "models.compress.quantization.codebook:cluster",
    "gptq": "models.compress.quantization.weight_only:step",
    "micro": "models.compress.micro:compile_model",
}
"""Kind of a step -> module and function, imported on use."""

SOURCE = "source"
PARAMS, TFLITE, FLOAT32, RECORD = "model.safetensors", "model.tflite", "float32.tflite", "step.json"
PACKED, C_ARRAY = "packed.safetensors", "model.cc"
_MAKERS = (
    "torch",
    "torchao",
    "torch-pruning",
    "litert-torch",
    "litert-converter",
    "ai-edge-quantizer",
    "ai-edge-litert",
)
_HASHES = {PARAMS: "params_sha256", TFLITE: "tflite_sha256", PACKED: "packed_sha256"}
"""File of a step's model -> key of `step.json`, None there if the model has no such file."""
_COMPARED = 16
"""Rows on which a reread model is compared with the step's result."""


class PipelineError(ValueError):
    """The pipeline is wrong; the message says at which step and key, and what was expected."""


@dataclass(frozen=True)
class PlannedStep:
    """A step with its options, ready to run. `options`: the dataclass of its kind."""

    kind: str
    options: Any
    function: Callable[[StepModel, Data, Any, Context], StepModel]


@dataclass(frozen=True)
class StepResult:
    """A finished step: its folder, the contents of `step.json`, and its model."""

    folder: Path
    record: Mapping[str, Any]
    model: StepModel


def plan_steps(tables: Sequence[Mapping[str, Any]], where: str) -> list[PlannedStep]:
    """The steps in `tables`, each with a `kind` and that kind's options.

    Raises:
        PipelineError: naming `where`, number and kind of the step, and the wrong key.
    """
    return [_plan_step(table, f"{where}: step {number}") for number, table in enumerate(tables, 1)]


def _plan_step(table: Mapping[str, Any], where: str) -> PlannedStep:
    settings = dict(table)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str) or kind not in STEPS:
        missing = "has no kind" if kind is None else f"has kind = {kind!r}"
        raise PipelineError(f"{where} {missing}, expected one of {', '.join(STEPS)}")
    module, _, name = STEPS[kind].partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        read = options.read(typing.get_type_hints(function)["options"], settings, f"{where} ({kind})")
    except options.OptionError as error:
        raise PipelineError(str(error)) from None
    return PlannedStep(kind, read, function)


def run(
    steps: Sequence[PlannedStep],
    source: StepModel,
    data: Data,
    folder: Path,
    seed: int,
    *,
    teachers: Mapping[str, StepModel] | None = None,
    on_progress: OnProgress = lambda line: None,
) -> list[StepResult]:
    """Runs `steps` in order in `folder`, and returns the results of all, step 0 being the source itself.

    Stored steps with the same key are reused. Folders of other steps are removed.

    Args:
        seed: of the pipeline; every step derives its own from it.

    Raises:
        StepRefused: a step is impossible; those before it remain stored.
    """
    named = dict(teachers or {})
    fixed = {
        "data": fingerprint(data),
        "original": identity(source),
        "teachers": {name: identity(model) for name, model in sorted(named.items())},
        "code": code_digest(),
    }

    def context(step_seed: int, line: Mapping[str, Any]) -> Context:
        return Context(step_seed, source, named, lambda event: on_progress({**event, **line}))

    done: list[StepResult] = []
    for number, step in enumerate((PlannedStep(SOURCE, None, _no_change), *steps)):
        previous = done[-1].model if done else source
        step_folder = folder / f"step-{number:02}-{step.kind}"
        step_seed = int(np.random.default_rng([seed, number]).integers(2**31))
        inputs = {
            "step": number,
            "kind": step.kind,
            "options": {} if step.options is None else asdict(step.options),
            "seed": step_seed,
            "parent": identity(previous),
        }
        key = _key({**inputs, **fixed})
        line = {"pipeline_step": number, "steps_in_all": len(steps), "kind": step.kind}
        if (stored := _load_stored(step_folder, key)) is None:
            on_progress({**line, "stage": "compress"})
            inputs |= {"key": key, "data_fingerprint": fixed["data"]}
            stored = _execute(step, previous, data, context(step_seed, line), step_folder, inputs)
        else:
            on_progress({**line, "stage": "kept"})
        done.append(stored)
    for stale in set(folder.glob("step-[0-9][0-9]-*")) - {each.folder for each in done}:
        shutil.rmtree(stale)
    return done


def _execute(
    step: PlannedStep,
    previous: StepModel,
    data: Data,
    context: Context,
    step_folder: Path,
    inputs: Mapping[str, Any],
) -> StepResult:
    started = time.perf_counter()
    result = step.function(replace(previous, facts={}), data, step.options, context)
    inputs = {**inputs, "seconds": time.perf_counter() - started}
    return _store(step_folder, _with_files_of(previous, result), data, inputs)


def measure(done: Sequence[StepResult], data: Data) -> list[dict[str, Any]]:
    """A row for every step: its facts and figures, and interleaved latencies of all models that devices can run."""
    files = {
        each.folder.name: (each.folder / name).read_bytes()
        for each in done
        for name in (TFLITE if each.model.tflite else FLOAT32,)
        if (each.folder / name).exists()
    }
    latencies = report.latency(files, data.x_test)
    return [
        {
            "name": each.folder.name,
            **{key: each.record[key] for key in ("step", "kind")},
            "model": each.model.spec.name,
            **each.record["figures"],
            "latency_us": latencies.get(each.folder.name),
            "seconds": each.record["seconds"],
            "facts": each.record["facts"],
        }
        for each in done
    ]


def lineage(done: Sequence[StepResult]) -> list[dict[str, Any]]:
    """The hashes of every step's output and of its input."""
    keys = ("step", "kind", "key", *_HASHES.values())
    return [
        {
            **{key: each.record[key] for key in keys},
            "parent_sha256": before.record["params_sha256"] if before else None,
        }
        for before, each in zip((None, *done), done, strict=False)
    ]


def fingerprint(data: Data) -> str:
    """SHA-256 of all rows and labels."""
    digest = hashlib.sha256()
    for name, array in sorted(vars(data).items()):
        if array is not None:
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """SHA-256 of the sources of `models` and of the versions of the libraries that steps use."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256("\n".join(f"{name} {version(name)}" for name in _MAKERS).encode())
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"\n{path.relative_to(folder)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def identity(model: StepModel) -> dict[str, Any]:
    """Identifies a model: its spec, and hashes of its params and its file."""
    return {
        "model": model.spec.described(),
        "params": hashlib.sha256(safetensors.numpy.save(params_of(model.module))).hexdigest(),
        "tflite": _digest(model.tflite),
        "packed": _digest(model.packed),
    }


def _no_change(model: StepModel, data: Data, options: Any, context: Context) -> StepModel:
    return model


def _digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _key(inputs: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _with_files_of(before: StepModel, after: StepModel) -> StepModel:
    """`after` without files that were made before the params changed; if they did not, with the packed form that an earlier step made."""
    if after.module is before.module:
        return replace(after, packed=after.packed or before.packed)
    tflite = None if after.tflite is before.tflite else after.tflite
    packed = None if after.packed is before.packed else after.packed
    precision: Precision = after.precision if tflite or packed else "float32"
    return replace(after, tflite=tflite, packed=packed, precision=precision)


def _store(step_folder: Path, model: StepModel, data: Data, inputs: Mapping[str, Any]) -> StepResult:
    """Stores a step, its record last, and reads it back."""
    if step_folder.exists():  # of another step, or unfinished
        (step_folder / RECORD).unlink(missing_ok=True)
        sync_folder(step_folder)
        shutil.rmtree(step_folder)
    step_folder.mkdir(parents=True)
    content = safetensors.numpy.save(params_of(model.module))
    write_durably(step_folder / PARAMS, content)
    if model.tflite is not None:
        write_durably(step_folder / TFLITE, model.tflite)
        if inputs["kind"] == "micro":
            write_durably(step_folder / C_ARRAY, c_array(model.tflite).encode())
    if model.packed is not None:
        write_durably(step_folder / PACKED, model.packed)
    float32, unconverted = _convert_float32(model)
    if float32 is not None:
        write_durably(step_folder / FLOAT32, float32)
    record = {
        **inputs,
        "model": model.spec.described(),
        "precision": model.precision,
        "params_sha256": _digest(content),
        "tflite_sha256": _digest(model.tflite),
        "packed_sha256": _digest(model.packed),
        "figures": report.measure(model, data.x_test, data.y_test, float32),
        "facts": {**model.facts, **({"not_converted": unconverted} if unconverted else {})},
    }
    stored = _read_model(step_folder, record)
    _require_same(model, stored, data, step_folder.name)
    write_durably(step_folder / RECORD, (json.dumps(record, indent=2) + "\n").encode())
    sync_folder(step_folder.parent)
    return StepResult(step_folder, record, stored)


def c_array(tflite: bytes) -> str:
    """C source for firmware without a file system: the file as an array that the linker puts into flash, aligned for tflite-micro, and its length."""
    lines = [
        "  " + ", ".join(f"0x{byte:02x}" for byte in tflite[start : start + 12]) + ","
        for start in range(0, len(tflite), 12)
    ]
    return (
        f"// {len(tflite)} bytes, a .tflite for tflite-micro\n"
        f"alignas(16) extern const unsigned char g_model[] = {{\n"
        + "\n".join(lines)
        + f"\n}};\nextern const unsigned int g_model_len = {len(tflite)};\n"
    )


def _load_stored(step_folder: Path, key: str) -> StepResult | None:
    """The step in `step_folder`, if it is complete and has that key."""
    try:
        record = json.loads((step_folder / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if record.get("key") != key:
        return None
    for name, field in _HASHES.items():
        path = step_folder / name
        if record[field] is not None and (not path.exists() or _digest(path.read_bytes()) != record[field]):
            return None
    return StepResult(step_folder, record, _read_model(step_folder, record))


def _read_model(step_folder: Path, record: Mapping[str, Any]) -> StepModel:
    settings = dict(record["model"])
    options, input_shape = settings.pop("options"), tuple(settings.pop("input_shape"))
    spec = zoo.get(**settings, input_shape=input_shape, **options)
    tflite, packed = (
        (step_folder / name).read_bytes() if record[_HASHES[name]] else None for name in (TFLITE, PACKED)
    )
    precision: Precision = record["precision"]
    module = rebuild(spec, read_params(step_folder / PARAMS))
    return StepModel(spec, module, tflite, precision, record["facts"], packed)


def _require_same(model: StepModel, stored: StepModel, data: Data, name: str) -> None:
    rows = data.x_test[:_COMPARED]
    before, after = report.logits(model.module, rows), report.logits(stored.module, rows)
    if not np.allclose(before, after, rtol=1e-3, atol=1e-4):
        raise StepRefused(
            f"{name}: the module rebuilt from its params gives other logits, by {np.abs(before - after).max():.3g} "
            "at most; names and shapes alone do not describe this change of its layers"
        )


def _convert_float32(model: StepModel) -> tuple[bytes | None, str]:
    """The `.tflite` of a float model; None if it has a file already or devices cannot run it, with the reason."""
    entry = catalog.MODELS.get(model.spec.name)
    if (model.tflite or model.packed) is not None or (entry is not None and "litert" not in entry.runtimes):
        return None, ""
    from models.compress.quantization.quantize import to_tflite

    try:
        return to_tflite(model.module, model.spec), ""
    except Exception as error:  # the converter raises anything for an unknown operation
        return None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
