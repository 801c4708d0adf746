"""Folders as pretraining, runs, compression and export leave them: small, and true to their own hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.wire import arrays
from edge_client.wire.inference import GoldenRows, InferenceManifest
from edge_client.wire.manifest import FileSpec, Fill, InputSpec, Lineage, Tolerance

DATA = "d" * 64
"""Fingerprint of the data that all these models were trained on."""
DRAWN = "b" * 64
"""Fingerprint of the rows of it that compressions calibrate with."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def params(seed: int) -> bytes:
    """A small model's params."""
    rng = np.random.default_rng(seed)
    return arrays.encode(
        {"fc.weight": rng.normal(size=(3, 4)).astype(np.float32), "fc.bias": np.zeros(3, np.float32)}
    )


def tflite(seed: int) -> bytes:
    """Bytes that bear a .tflite's mark; nothing here runs them."""
    return b"\x1c\x00\x00\x00TFL3" + np.random.default_rng(seed).bytes(200)


def onnx(*external: str, outputs: int = 1) -> bytes:
    """A model of one node, with a tensor in each of these files; written by hand, as protobuf has it."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def tensor(place: str) -> bytes:
        return field(8, b"w") + field(13, field(1, b"location") + field(2, place.encode())) + b"\x70\x01"

    graph = field(1, field(1, b"x") + field(2, b"y") + field(4, b"Relu")) + field(2, b"g")
    graph += b"".join(field(5, tensor(each)) for each in external)
    graph += field(12, field(1, b"y")) * outputs
    return b"\x08\x0a" + field(8, b"\x10\x14") + field(7, graph)


def released(source: bytes) -> bytes:
    """The file of a release that is made from this one."""
    return source + b"any number of rows"


def write(folder: Path, name: str, content: bytes | Mapping[str, Any]) -> str:
    """A file in the folder, JSON unless bytes; its hash."""
    payload = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(payload)
    return sha256(payload)


def pretrained(folder: Path, seed: int = 0, parent: str | None = None) -> str:
    """What `fedloop pretrain` leaves; the hash of its params."""
    digest = write(folder, "model.safetensors", params(seed))
    lineage = {
        "model_sha256": digest,
        "parent": {"path": "/elsewhere/model.safetensors", "sha256": parent} if parent else None,
        "data_fingerprint": DATA,
        "config_sha256": "c" * 64,
        "code_version": "1.0",
        "seed": seed,
    }
    write(folder, "lineage.json", lineage)
    write(folder, "model.json", {"name": "logreg", "options": {}, "classes": 3, "sha256": digest})
    final = {"test_accuracy": 0.9 + seed / 1000, "test_loss": 0.3, "parameters": 15, "model_sha256": digest}
    write(folder, "report.json", {"final": final, "lineage": lineage})
    return digest


def compressed(
    folder: Path, parent: str, seed: int = 0, student: bytes | None = None, packed: bytes | None = None
) -> tuple[str, bytes]:
    """What `fedloop compress` leaves of the params with the hash `parent`; the hash of its own, and its file.

    `student`: params of its own, unless it only quantized. `packed`: those of a step `gptq` too.
    """
    small = tflite(seed)
    digest = write(folder, "model.safetensors", student or params(seed + 1000))
    lineage = {
        "parent": {"model_sha256": parent, "data_fingerprint": DATA, "config_sha256": "c" * 64},
        "model_sha256": digest,
        "tflite_sha256": write(folder, "model.tflite", small),
        "packed_sha256": write(folder, "packed.safetensors", packed) if packed else None,
        "data_fingerprint": DRAWN,
        "steps": [{"step": 0, "kind": "source"}, {"step": 1, "kind": "quantize"}],
        "code_version": "1.0",
        "seed": seed,
    }
    write(folder, "lineage.json", lineage)
    write(folder, "model.json", {"name": "logreg", "options": {}, "precision": "int8", "sha256": digest})
    step = {"name": "1-quantize", "kind": "quantize", "accuracy": 0.88, "bytes": len(small)}
    write(folder, "report.json", {"source": {"accuracy": 0.9}, "steps": [step], "final": {"accuracy": 0.88}})
    write(folder, "steps/1-quantize/model.tflite", small)
    return digest, small


def release(
    folder: Path, version: int, params_sha256: str, source: bytes, model: str = "digits"
) -> InferenceManifest:
    """A release folder, made from the .tflite `source`."""
    model_file = released(source)
    manifest = InferenceManifest(
        model=model,
        version=version,
        architecture="logreg",
        options={},
        task="classification",
        classes=3,
        input=InputSpec((4,), "float32"),
        precision="static-int8",
        operators=(),
        minimum_runtime="2.0",
        runtimes=("litert",),
        memory_bytes=10_000_000,
        file=FileSpec(sha256(model_file), len(model_file)),
        golden=GoldenRows(Fill(0.0, 1.0), ((0.1, 0.2, 0.3),), Tolerance(1e-3, 1e-3)),
        params_sha256=params_sha256,
        lineage=Lineage(parent=params_sha256, pipeline_step="export", data_fingerprint=DRAWN),
    )
    write(folder, "manifest.json", manifest.to_json().encode())
    digest = write(folder, "model.tflite", model_file)
    write(
        folder,
        "report.json",
        {"accuracy": 0.87, "sha256": digest, "source": {"tflite_sha256": sha256(source)}},
    )
    return manifest


def run_left(folder: Path, seed: int = 0, run: str | None = None) -> str:
    """What `fedloop simulate` leaves, or with an id `fedloop run`; the hash of its params."""
    digest = write(folder, "model.safetensors", params(seed))
    final = {"test_accuracy": 0.95, "test_loss": 0.2, "model_sha256": digest}
    report = {
        "experiment": {"model": {"name": "logreg"}},
        "data": {"fingerprint": DATA},
        "rounds": [{}, {}],
        "final": final,
    }
    write(folder, "report.json", report | ({"run": run} if run else {}))
    write(folder, "experiment.toml", b'name = "digits"\n')
    return digest
