"""Checks whether a released model may be used on this machine: its runtime, its memory and its answers.

An old runtime may run a file without an error and compute something else. So the manifest defines golden rows, whose
numbers follow from integers (`edge_client.train.golden`, stream 0), the right logits, and real rows with their classes.
A model with other answers is refused, whatever its signature says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edge_client.train import golden
from edge_client.train.golden import SelfTestFailed
from edge_client.wire.inference import InferenceManifest
from edge_client.wire.manifest import ManifestError

if TYPE_CHECKING:
    from edge_client.infer.runtime import LoadedRelease

Predict = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]
"""Rows [N, …] -> logits [N, …], as `LoadedRelease.predict`."""

_MEMINFO = Path("/proc/meminfo")


class NotEnoughMemory(ManifestError):
    """The machine has less free memory now than the model needs by its manifest."""


def require(loaded: LoadedRelease) -> float | None:
    """Checks runtime, memory and answers. Returns the accuracy on the manifest's real rows, None if it has none.

    Raises:
        ManifestError: the release is not for this runtime. NotEnoughMemory: too little is free now.
        SelfTestFailed: naming the row, the value and the expected one.
    """
    manifest = loaded.manifest
    what = f"{manifest.model}:{manifest.version}"
    if loaded.runtime not in manifest.runtimes:
        known = ", ".join(manifest.runtimes) or "no runtime"
        raise ManifestError(f"{what} ({manifest.precision}) is for {known}; this device has {loaded.runtime}")
    available = available_memory()
    if available is not None and manifest.memory_bytes > available:
        raise NotEnoughMemory(
            f"{what} needs {manifest.memory_bytes} bytes of memory; this device has {available} free"
        )
    return require_answers(loaded.predict, manifest)


def require_answers(predict: Predict, manifest: InferenceManifest) -> float | None:
    """Checks the answers to the golden rows. Returns the accuracy on the real rows, None if there are none.

    Raises:
        SelfTestFailed: a logit is off by more than the tolerance, or the accuracy on real rows is too low.
    """
    answers = manifest.golden
    tolerance = answers.tolerance
    got = last_position(predict(synthetic_rows(manifest, len(answers.logits))))
    for row, (actual, expected) in enumerate(zip(got.astype(float), answers.logits, strict=True)):
        for place, (a, b) in enumerate(zip(actual.tolist(), expected, strict=True)):
            # Written so that a NaN, whose comparisons are all false, fails.
            if not abs(a - b) <= tolerance.absolute + tolerance.relative * abs(b):
                raise SelfTestFailed("infer", f"logits of row {row}", f"class {place}", a, b)
    if not answers.real_y:
        return None
    x = real_rows(manifest)
    correct = last_position(predict(x)).argmax(-1) == np.asarray(answers.real_y)
    accuracy = float(correct.mean())
    if not accuracy >= answers.least_accuracy:
        raise SelfTestFailed(
            "infer", f"logits of {len(x)} real rows", "accuracy", accuracy, answers.least_accuracy
        )
    return accuracy


def synthetic_rows(manifest: InferenceManifest, count: int) -> npt.NDArray[Any]:
    """The first `count` golden rows."""
    spec = manifest.input
    shape = (count, *spec.shape)
    if spec.dtype == "float32":
        return golden.floats(shape, 0, manifest.golden.x)
    return golden.ids(shape, 0, spec.vocab or manifest.classes)


def real_rows(manifest: InferenceManifest) -> npt.NDArray[Any]:
    """The manifest's real rows [N, …]."""
    rows = np.asarray(manifest.golden.real_x, manifest.input.dtype)
    return rows.reshape(len(manifest.golden.real_y), *manifest.input.shape)


def last_position(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[N, classes]; for sequences the logits of the last position."""
    return logits if logits.ndim == 2 else logits[:, -1]


def available_memory() -> int | None:
    """Bytes available to a process now; None if the machine does not report it."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
