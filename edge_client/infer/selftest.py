"""Whether a released model may be used on this very machine: does it fit, and are its answers right.

An old runtime may run a file without an error and compute something else. So the manifest holds a question whose numbers
follow from integers (`edge_client.train.golden`, stream 0), the right logits, and real rows with their classes. A
model that answers otherwise is refused, whatever its signature says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.infer.runtime import Loaded
from edge_client.train import golden
from edge_client.train.golden import SelfTestFailed
from edge_client.wire.inference import InferenceManifest
from edge_client.wire.manifest import ManifestError

Predict = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]
"""Rows [N, …] -> logits [N, …], as `Loaded.predict`."""

_MEMINFO = Path("/proc/meminfo")


class TooLittleMemory(ManifestError):
    """The machine has less memory free now than the manifest says that the model takes."""


def require(loaded: Loaded) -> float | None:
    """Accuracy on the manifest's real rows, None where it has none, once all its answers are right.

    Raises:
        ManifestError: it is not for this runtime. TooLittleMemory: not now.
        SelfTestFailed: naming the row, what came and what was expected.
    """
    manifest = loaded.manifest
    what = f"{manifest.model}:{manifest.version}"
    if loaded.runtime not in manifest.runtimes:
        known = ", ".join(manifest.runtimes) or "no runtime"
        raise ManifestError(f"{what} ({manifest.precision}) is for {known}; this device has {loaded.runtime}")
    available = available_memory()
    if available is not None and manifest.memory_bytes > available:
        raise TooLittleMemory(
            f"{what} needs {manifest.memory_bytes} bytes of memory; this device has {available} free"
        )
    return require_answers(loaded.predict, manifest)


def require_answers(predict: Predict, manifest: InferenceManifest) -> float | None:
    """Poses the manifest's questions. Accuracy on its real rows, None where it has none.

    Raises:
        SelfTestFailed: a logit is off by more than the tolerance, or too few real rows were told right.
    """
    answers = manifest.golden
    tolerance = answers.tolerance
    got = last_place(predict(synthetic_rows(manifest, len(answers.logits))))
    for row, (found, expected) in enumerate(zip(got.astype(float), answers.logits, strict=True)):
        for place, (a, b) in enumerate(zip(found.tolist(), expected, strict=True)):
            # Written so that a NaN, which compares with nothing, is off.
            if not abs(a - b) <= tolerance.absolute + tolerance.relative * abs(b):
                raise SelfTestFailed("infer", f"logits of row {row}", f"class {place}", a, b)
    if not answers.real_y:
        return None
    x = real_rows(manifest)
    correct = last_place(predict(x)).argmax(-1) == np.asarray(answers.real_y)
    accuracy = float(correct.mean())
    if not accuracy >= answers.least_accuracy:
        raise SelfTestFailed(
            "infer", f"logits of {len(x)} real rows", "accuracy", accuracy, answers.least_accuracy
        )
    return accuracy


def synthetic_rows(manifest: InferenceManifest, count: int) -> npt.NDArray[Any]:
    """The first `count` rows of the golden question."""
    described = manifest.input
    shape = (count, *described.shape)
    if described.dtype == "float32":
        return golden.floats(shape, 0, manifest.golden.x)
    return golden.ids(shape, 0, described.vocab or manifest.classes)


def real_rows(manifest: InferenceManifest) -> npt.NDArray[Any]:
    """The manifest's real rows [N, …]."""
    rows = np.asarray(manifest.golden.real_x, manifest.input.dtype)
    return rows.reshape(len(manifest.golden.real_y), *manifest.input.shape)


def last_place(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[N, classes]; of sequences those of the last place."""
    return logits if logits.ndim == 2 else logits[:, -1]


def available_memory() -> int | None:
    """Bytes that the machine could give a process now; None where it does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
