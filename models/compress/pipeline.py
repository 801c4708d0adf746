"""A compression as a sequence of steps, each kept on disk as soon as it is done.

    1. `planned`: the `[[step]]` tables of a pipeline as steps with checked options
    2. `run`: the source is step 0; every further step takes what the one before it has left
    3. a step's folder, `step-01-distil/`: `model.safetensors`, `model.tflite` once there is one, `float32.tflite` that
       size and latency of a float model are measured with, `model.cc` of a step `micro`, and last of all `step.json`

A step's key is the hash of all it is a function of: the model it takes, the original and the teachers, its options, the data,
its seed, our code and the libraries' versions. (The code of a user's own model is not part of it.) One whose folder holds that key is not run again, whether an earlier run was killed or only later steps were changed.
A model always goes through its files, so that a run that was resumed gives what one that was not would have given.
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
from safetensors import SafetensorError

from edge_client.files import sync_folder, write_durably
from models import catalog, options, zoo
from models.compress import report
from models.compress.c_array import c_array
from models.compress.step import Context, Data, Model, Precision, StepRefused
from models.compress.structure import rebuilt
from models.job import JobError
from models.pretrain.params import Params, params_of
from models.zoo.spec import ModelSpec

STEPS: Mapping[str, str] = {
    "distil": "models.compress.distil:step",
    "prune": "models.compress.prune:prune",
    "structured": "models.compress.structured:structured",
    "lowrank": "models.compress.lowrank:factorise",
    "fold": "models.compress.graph:fold",
    "quantize": "models.compress.quantize:step",
    "mixed": "models.compress.sensitivity:mixed",
    "qat": "models.compress.qat:train",
    "codebook": "models.compress.codebook:cluster",
    "micro": "models.compress.micro:microcontroller",
}
"""Kind of a step -> where it is, imported when it is used."""

SOURCE = "source"
PARAMS, TFLITE, FLOAT32, RECORD = "model.safetensors", "model.tflite", "float32.tflite", "step.json"
C_ARRAY = "model.cc"
_MAKERS = (
    "torch",
    "torchao",
    "torch-pruning",
    "litert-torch",
    "litert-converter",
    "ai-edge-quantizer",
    "ai-edge-litert",
)
_COMPARED = 16
"""Rows on which a model read back is compared with what the step gave."""

Tell = Callable[[Mapping[str, Any]], None]


class PipelineError(ValueError):
    """The pipeline is wrong; the message says at which step and key, and what was expected."""


@dataclass(frozen=True)
class Planned:
    """A step with its options, ready to be run. `options`: the dataclass of its kind."""

    kind: str
    options: Any
    act: Callable[[Model, Data, Any, Context], Model]


@dataclass(frozen=True)
class Done:
    """A step that is done: its folder, what `step.json` says, and the model it has left."""

    folder: Path
    record: Mapping[str, Any]
    model: Model


def planned(tables: Sequence[Mapping[str, Any]], where: str) -> list[Planned]:
    """The steps that `tables`, each with a `kind` and that kind's options, ask for.

    Raises:
        PipelineError: `where`, number and kind of the step, and the key that is wrong.
    """
    return [_planned(table, f"{where}: step {number}") for number, table in enumerate(tables, 1)]


def _planned(table: Mapping[str, Any], where: str) -> Planned:
    given = dict(table)
    kind = given.pop("kind", None)
    if not isinstance(kind, str) or kind not in STEPS:
        missing = "has no kind" if kind is None else f"has kind = {kind!r}"
        raise PipelineError(f"{where} {missing}, expected one of {', '.join(STEPS)}")
    module, _, function = STEPS[kind].partition(":")
    act = getattr(importlib.import_module(module), function)
    try:
        read = options.read(typing.get_type_hints(act)["options"], given, f"{where} ({kind})")
    except options.OptionError as error:
        raise PipelineError(str(error)) from None
    return Planned(kind, read, act)


def run(
    steps: Sequence[Planned],
    source: Model,
    data: Data,
    folder: Path,
    seed: int,
    *,
    teachers: Mapping[str, Model] | None = None,
    tell: Tell = lambda line: None,
) -> list[Done]:
    """Runs `steps` one after the other in `folder`, and gives all that were done, step 0 being the source itself.

    Steps that are already there, with the same key, are taken from there. Folders of other steps are removed.

    Args:
        seed: of the pipeline; every step draws one of its own from it.

    Raises:
        StepRefused: a step could not be done; those before it are kept.
    """
    named = dict(teachers or {})
    fixed = {
        "data": fingerprint(data),
        "original": identity(source),
        "teachers": {name: identity(model) for name, model in sorted(named.items())},
        "code": code(),
    }
    done: list[Done] = []
    for number, step in enumerate((Planned(SOURCE, None, _itself), *steps)):
        taken = done[-1].model if done else source
        place = folder / f"step-{number:02}-{step.kind}"
        step_seed = int(np.random.default_rng([seed, number]).integers(2**31))
        asked = {
            "step": number,
            "kind": step.kind,
            "options": {} if step.options is None else asdict(step.options),
            "seed": step_seed,
            "parent": identity(taken),
        }
        key = _key({**asked, **fixed})
        line = {"pipeline_step": number, "steps_in_all": len(steps), "kind": step.kind}
        if (kept := _kept(place, key)) is None:
            tell({**line, "stage": "compress"})
            context = Context(
                step_seed,
                source,
                named,
                lambda said, line=line: tell({**said, **line}),  # type: ignore[misc]
            )
            began = time.perf_counter()
            given = _consistent(taken, step.act(replace(taken, facts={}), data, step.options, context))
            asked |= {"seconds": time.perf_counter() - began, "key": key, "data_fingerprint": fixed["data"]}
            kept = _keep(place, given, data, asked)
        else:
            tell({**line, "stage": "kept"})
        done.append(kept)
    for stale in set(folder.glob("step-[0-9][0-9]-*")) - {each.folder for each in done}:
        shutil.rmtree(stale)
    return done


def measured(done: Sequence[Done], data: Data) -> list[dict[str, Any]]:
    """A row for every step: what it did, its figures, and latencies of all that devices can run, taken in turns."""
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


def lineage(done: Sequence[Done]) -> list[dict[str, Any]]:
    """Which file came from which: hashes of every step's output and of what it was made from."""
    keys = ("step", "kind", "key", "params_sha256", "tflite_sha256")
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
def code() -> str:
    """SHA-256 of the sources of `models` and of the versions of the libraries that steps are made with."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256("\n".join(f"{name} {version(name)}" for name in _MAKERS).encode())
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"\n{path.relative_to(folder)} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def identity(model: Model) -> dict[str, Any]:
    """What tells a model from others: its spec, and hashes of its params and its file."""
    return {
        "model": described(model.spec),
        "params": hashlib.sha256(safetensors.numpy.save(params_of(model.module))).hexdigest(),
        "tflite": hashlib.sha256(model.tflite).hexdigest() if model.tflite else None,
    }


def described(spec: ModelSpec) -> dict[str, Any]:
    """The spec as job files have it."""
    return {
        "name": spec.name,
        "options": dict(spec.options),
        "input_shape": list(spec.input_shape),
        "classes": spec.classes,
        "input_dtype": spec.input_dtype,
        "task": spec.task,
    }


def read_params(path: Path) -> Params:
    """The tensors in a `.safetensors` file.

    Raises:
        JobError: it cannot be read.
    """
    try:
        return safetensors.numpy.load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise JobError(f"{path} is not a readable .safetensors file: {error}") from error


def _itself(model: Model, data: Data, options: Any, context: Context) -> Model:
    return model


def _key(inputs: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _consistent(before: Model, after: Model) -> Model:
    """A file that was made of params which have changed since is none of the new model."""
    if after.tflite is not None and after.tflite is before.tflite and after.module is not before.module:
        return replace(after, tflite=None, precision="float32")
    return after


def _keep(place: Path, model: Model, data: Data, asked: Mapping[str, Any]) -> Done:
    """Writes a step down, its record last, and reads it back."""
    if place.exists():  # another step's, or one that was not finished
        (place / RECORD).unlink(missing_ok=True)
        sync_folder(place)
        shutil.rmtree(place)
    place.mkdir(parents=True)
    content = safetensors.numpy.save(params_of(model.module))
    write_durably(place / PARAMS, content)
    if model.tflite is not None:
        write_durably(place / TFLITE, model.tflite)
        if asked["kind"] == "micro":
            write_durably(place / C_ARRAY, c_array(model.tflite).encode())
    float32, unconverted = _float32(model)
    if float32 is not None:
        write_durably(place / FLOAT32, float32)
    found = report.figures(model, data.x_test, data.y_test, float32).document()
    found.pop("latency_us")
    record = {
        **asked,
        "model": described(model.spec),
        "precision": model.precision,
        "params_sha256": hashlib.sha256(content).hexdigest(),
        "tflite_sha256": hashlib.sha256(model.tflite).hexdigest() if model.tflite else None,
        "figures": found,
        "facts": {**model.facts, **({"not_converted": unconverted} if unconverted else {})},
    }
    again = _read(place, record)
    _require_same(model, again, data, place.name)
    write_durably(place / RECORD, (json.dumps(record, indent=2) + "\n").encode())
    sync_folder(place.parent)
    return Done(place, record, again)


def _kept(place: Path, key: str) -> Done | None:
    """The step in `place`, if it is whole and has that key."""
    try:
        record = json.loads((place / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if record.get("key") != key:
        return None
    for name, field in ((PARAMS, "params_sha256"), (TFLITE, "tflite_sha256")):
        if record[field] is None:
            continue
        path = place / name
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != record[field]:
            return None
    return Done(place, record, _read(place, record))


def _read(place: Path, record: Mapping[str, Any]) -> Model:
    about = dict(record["model"])
    spec = zoo.get(
        about["name"],
        input_shape=tuple(about["input_shape"]),
        classes=about["classes"],
        input_dtype=about["input_dtype"],
        task=about["task"],
        **about["options"],
    )
    tflite = (place / TFLITE).read_bytes() if record["tflite_sha256"] else None
    precision: Precision = record["precision"]
    return Model(spec, rebuilt(spec, read_params(place / PARAMS)), tflite, precision, record["facts"])


def _require_same(given: Model, again: Model, data: Data, name: str) -> None:
    rows = data.x_test[:_COMPARED]
    before, after = report.logits(given.module, rows), report.logits(again.module, rows)
    if not np.allclose(before, after, rtol=1e-3, atol=1e-4):
        raise StepRefused(
            f"{name}: the module read back from its params answers otherwise, by {np.abs(before - after).max():.3g} "
            "in a logit; this change of its layers cannot be told by names and shapes"
        )


def _float32(model: Model) -> tuple[bytes | None, str]:
    """A float model as devices would run it; None where they have its file already, or cannot run it, and then why."""
    entry = catalog.MODELS.get(model.spec.name)
    if model.tflite is not None or (entry is not None and "litert" not in entry.runtimes):
        return None, ""
    from models.compress.quantize import converted

    try:
        return converted(model.module, model.spec), ""
    except Exception as error:  # whatever the converter raises of an operation it does not know
        return None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
