"""Release folders of one small model on digits in every precision, made once a test session."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_quantizer import quantizer, recipe

from models.compress.quantization.quantize import to_tflite
from models.compress.step import Data, Precision, StepModel
from models.release.inference import (
    ReleaseOptions,
    Source,
    release,
)
from tests.support.compression import digits, trained
from tests.support.require import require

_KEPT = tempfile.TemporaryDirectory(prefix="releases-")
ROOT = Path(__file__).parents[2]
NAME = "digits"

_RECIPES: dict[str, Any] = {
    "weight-int8": recipe.weight_only_wi8_afp32,
    "dynamic-int8": recipe.dynamic_wi8_afp32,
    "static-int8": recipe.static_wi8_ai8,
}


@dataclass(frozen=True)
class Released:
    folder: Path
    report: dict[str, Any]

    def verdict(self, runtime: str) -> dict[str, Any]:
        found: dict[str, Any] = next(v for v in self.report["verdicts"] if v["runtime"] == runtime)
        return found


def constrained_python() -> Path:
    """The interpreter of the environment with tflite-runtime."""
    named = os.environ.get("FEDLOOP_CONSTRAINED_PYTHON") or ROOT / ".venv-constrained" / "bin" / "python"
    if not Path(named).exists():
        require("tflite-runtime", f"{named} does not exist; run `make constrained`")
    return Path(named)


@functools.cache
def model() -> tuple[StepModel, Data]:
    data = digits()
    return trained("cnn", data, 8, hidden=32), data


@functools.cache
def tflite(precision: str) -> bytes:
    made, data = model()
    with tempfile.TemporaryDirectory() as folder:
        path, quantized = Path(folder) / "float32", Path(folder) / "quantized"
        if precision == "float32":
            return to_tflite(made.module, made.spec)
        path.write_bytes(tflite("float32"))
        maker = quantizer.Quantizer(str(path), _RECIPES[precision]())
        rows = [{"x": row[None]} for row in data.x_train[:100]]
        ranges = maker.calibrate({"infer": rows}) if precision == "static-int8" else None
        maker.quantize(ranges).export_model(str(quantized), overwrite=True)
        return quantized.read_bytes()


def source(precision: Precision) -> Source:
    made, _ = model()
    return Source(made.spec, tflite(precision), precision, made.module)


@functools.cache
def released(precision: Precision, version: int = 1, real_rows: int = 0) -> Released:
    """A release that was tried on all runtimes this machine has."""
    _, data = model()
    folder = Path(_KEPT.name) / f"{precision}-{version}-{real_rows}"
    python = os.environ.get("FEDLOOP_CONSTRAINED_PYTHON") or ROOT / ".venv-constrained" / "bin" / "python"
    report = release(
        source(precision),
        data.x_test,
        data.y_test,
        ReleaseOptions(name=NAME, version=version, real_rows=real_rows),
        folder,
        tflite_runtime=Path(python),
    )
    return Released(folder, report)


def rows() -> np.ndarray[Any, np.dtype[np.float32]]:
    found: np.ndarray[Any, np.dtype[np.float32]] = model()[1].x_test
    return found
