"""Inference export: torch params to `.tflite`, in float32 and in static int8, behind a gate.

Run as `python -P -m models.compress.quantize JOB.json` with `model`, `params` and arrays `x_train` (rows to
calibrate on; they must be free to leave their owner), `x_test`, `y_test`. Both files have one signature
`infer(x) -> logits` for one example at a time, weights inside.

float32 is checked against torch. int8 is static: symmetric weights per channel, asymmetric activations
per tensor, ranges from the calibration rows. Its interface is int8 as well, so that a device without
floating point can run it: input and output carry scale and zero point (token inputs stay int32).
`result.json` says what was done and measured. An export that loses too much accuracy, or that the
quantizer left in float32, is refused and leaves no file.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from edge_client import process
from edge_client.train.trainer import score
from models import job as jobs
from models.options import bounded
from models.pretrain import evaluation, params
from models.zoo import ModelSpec

SIGNATURE = "infer"
FLOAT_TOLERANCE = 1e-4
"""Largest difference from torch's logits that float32 may show, in units of the largest logit."""


class ExportRefused(ValueError):
    """The exported model is not good enough to be handed on; the message says by how much."""


@dataclass(frozen=True)
class Options:
    """How to quantize.

    Attributes:
        calibration_rows: at most so many rows of `x_train` set the ranges of activations.
        max_accuracy_drop: how far below float32 the accuracy of int8 may fall, as a fraction.
    """

    calibration_rows: int = bounded(256, 1, 100_000)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


@dataclass(frozen=True)
class Measured:
    """One `.tflite` file on test rows. `logits` are dequantized, [N, (T,) classes]."""

    path: Path
    logits: npt.NDArray[np.float32]
    accuracy: float
    latency_us: float
    input_dtype: str
    output_dtype: str

    def figures(self) -> dict[str, Any]:
        return {
            "bytes": self.path.stat().st_size,
            "accuracy": self.accuracy,
            "latency_us": self.latency_us,
            "input": self.input_dtype,
            "output": self.output_dtype,
        }


def run(path: Path, report: process.Report) -> None:
    """The whole job, from its file."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = job.spec(), job.options(Options)
    x, x_test = job.rows("x_train", spec), job.rows("x_test", spec)
    y_test = job.labels("y_test", spec, x_test)
    module = spec.build(job.seed)
    params.load(module, job.file("params", job.value("params")))
    module.eval()

    files = {kind: job.out / f".model_{kind}.tflite.{os.getpid()}" for kind in ("fp32", "int8")}
    try:
        report(stage="quantize", step="convert")
        convert(module, spec, files["fp32"])
        report(stage="quantize", step="calibrate")
        quantize(files["fp32"], x[: options.calibration_rows], files["int8"])
        report(stage="quantize", step="verify")
        fp32, int8 = (measure(files[kind], x_test, y_test) for kind in ("fp32", "int8"))
        expected = evaluation.logits_of(module, x_test, torch.device("cpu")).numpy()
        error = require_same_logits(fp32.logits, expected)
        kinds = require_integers(files["int8"])
        require_accuracy(fp32.accuracy, int8.accuracy, options.max_accuracy_drop)
        result = {
            "fp32": {**fp32.figures(), "max_abs_error": error},
            "int8": {**int8.figures(), **kinds, "recipe": "static_wi8_ai8"},
            "agreement": float((fp32.logits.argmax(-1) == int8.logits.argmax(-1)).mean()),
            "calibration_rows": min(len(x), options.calibration_rows),
            "seconds": time.perf_counter() - started,
        }
        for kind, file in files.items():
            file.replace(job.out / f"model_{kind}.tflite")
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)
    jobs.write_result(job.out, result)


def convert(module: nn.Module, spec: ModelSpec, path: Path) -> None:
    """Writes `module` as float32 `.tflite`, signature `infer(x[1, …]) -> logits[1, …]`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    import litert_torch

    x, _ = spec.example_batch(1)
    edge = litert_torch.signature(SIGNATURE, _Inference(module).eval(), (), {"x": x}).convert()
    edge.export(str(path))


def quantize(source: Path, rows: npt.NDArray[Any], path: Path) -> None:
    """Writes the float32 model `source` with int8 weights and activations, ranges taken from `rows`."""
    from ai_edge_quantizer import quantizer, recipe
    from ai_edge_quantizer.qtyping import TFLOperationName

    maker = quantizer.Quantizer(str(source), recipe.static_wi8_ai8())
    # the static recipe passes over embedding tables, most of the weights of a text model; the lookup
    # gives float32, which the next operation quantizes
    maker.add_dynamic_config(".*", TFLOperationName.EMBEDDING_LOOKUP, num_bits=8)
    ranges = maker.calibrate({SIGNATURE: [{"x": row[None]} for row in rows]})
    maker.quantize(ranges).export_model(str(path), overwrite=True)


def measure(path: Path, x: npt.NDArray[Any], y: npt.NDArray[np.int32]) -> Measured:
    """Runs the file on every row, one at a time, on one thread."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    (source,), (target,) = interpreter.get_input_details(), interpreter.get_output_details()
    logits, seconds = [], []
    for row in x:
        interpreter.set_tensor(source["index"], _quantized(row[None], source))
        began = time.perf_counter()
        interpreter.invoke()
        seconds.append(time.perf_counter() - began)
        logits.append(_dequantized(interpreter.get_tensor(target["index"]), target)[0])
    stacked = np.stack(logits)
    result = score(stacked, y)
    return Measured(
        path,
        stacked,
        result.accuracy,
        statistics.median(seconds) * 1e6,
        np.dtype(source["dtype"]).name,
        np.dtype(target["dtype"]).name,
    )


def require_same_logits(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The largest absolute difference between the exported float32 model and torch.

    Raises:
        ExportRefused: it is more than float rounding explains, so the conversion is wrong.
    """
    error = float(np.abs(actual - expected).max())
    allowed = FLOAT_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not error <= allowed:
        raise ExportRefused(
            f"the exported float32 model differs from torch by {error:.3g} in a logit, expected at most {allowed:.3g}; "
            "the conversion of one of its operations is wrong"
        )
    return error


def require_integers(path: Path) -> dict[str, Any]:
    """Counts what the file itself stores: `int8_tensors`, `float_tensors`, `int8_weight_share` of weight values.

    Some operations of some models have no integer kernel and keep float activations. Weights may not.

    Raises:
        ExportRefused: less than half of the weight values are int8.
    """
    tensors = stored_tensors(path)
    floats = [tensor for tensor in tensors if tensor.dtype == "float32"]
    weights = [tensor for tensor in tensors if tensor.constant and len(tensor.shape) > 1]
    values = {t: sum(w.size for w in weights if w.dtype == t) for t in ("int8", "float32")}
    share = values["int8"] / max(1, sum(values.values()))
    if share < 0.5:
        raise ExportRefused(
            f"only {share:.0%} of the weight values became int8; float32 remain, among others, "
            f"{', '.join(w.name for w in weights if w.dtype == 'float32')[:200] or 'no weights at all'}"
        )
    return {
        "int8_tensors": sum(tensor.dtype == "int8" for tensor in tensors),
        "float_tensors": len(floats),
        "int8_weight_share": share,
    }


def require_accuracy(fp32: float, int8: float, max_drop: float) -> None:
    """The gate of the export.

    Raises:
        ExportRefused: int8 is more than `max_drop` below float32.
    """
    if fp32 - int8 > max_drop + 1e-9:  # both are fractions of the same rows; the slack is for their rounding
        raise ExportRefused(
            f"int8 accuracy is {int8:.4f}, {100 * (fp32 - int8):.1f} points below float32 ({fp32:.4f}), allowed are "
            f"{100 * max_drop:.1f}; calibrate on more, or more typical, rows, or raise options.max_accuracy_drop"
        )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the flatbuffer declares it. `constant`: its values are stored in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    constant: bool

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def stored_tensors(path: Path) -> Sequence[StoredTensor]:
    """Every tensor of every subgraph, read from the file's own tables, not from a runtime."""
    from ai_edge_litert import schema_py_generated as schema

    names = {value: name.lower() for name, value in vars(schema.TensorType).items() if isinstance(value, int)}
    model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    return [
        StoredTensor(
            tensor.name.decode(),
            names[tensor.type],
            tuple(int(extent) for extent in tensor.shape) if tensor.shape is not None else (),
            model.buffers[tensor.buffer].data is not None or bool(model.buffers[tensor.buffer].offset),
        )
        for subgraph in model.subgraphs
        for tensor in subgraph.tensors
    ]


class _Inference(nn.Module):
    """Gives the output of the signature its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.module(x)}


def _quantized(x: npt.NDArray[Any], tensor: dict[str, Any]) -> npt.NDArray[Any]:
    scale, zero_point = tensor["quantization"]
    if not scale:
        return x
    limits = np.iinfo(tensor["dtype"])
    steps: npt.NDArray[Any] = np.clip(np.rint(x / scale) + zero_point, limits.min, limits.max)
    return steps.astype(tensor["dtype"])


def _dequantized(values: npt.NDArray[Any], tensor: dict[str, Any]) -> npt.NDArray[np.float32]:
    scale, zero_point = tensor["quantization"]
    return ((values.astype(np.float32) - zero_point) * scale if scale else values).astype(np.float32)


if __name__ == "__main__":
    process.serve(run)
