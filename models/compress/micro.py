"""For microcontrollers: static int8 that runs in tflite-micro within a given arena, and the C array for the firmware.

tflite-micro allocates all its memory in one array of bytes, the arena, at start; that is the model's share of a
microcontroller's RAM, while the `.tflite` itself lies in flash. The file runs in the real interpreter, in a separate
process because it may crash; its message explains unsupported operations and precisions.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.processes.process import ProcessFailed, run_once, tie_to_parent
from edge_client.train.evaluation import score
from models.compress import report
from models.compress.quantization import quantize
from models.compress.step import Context, Data, StepModel, StepRefused
from models.conversion import flatbuffer
from models.options import bounded

SECONDS = 600
"""Time limit of the interpreter for all rows."""

# https://github.com/tensorflow/tflite-micro, micro_mutable_op_resolver.h
_OPERATORS = """
    ABS ADD ADD_N ARG_MAX ARG_MIN ASSIGN_VARIABLE AVERAGE_POOL_2D BATCH_MATMUL BATCH_TO_SPACE_ND BROADCAST_ARGS
    BROADCAST_TO CALL_ONCE CAST CEIL CONCATENATION CONV_2D COS CUMSUM DEPTH_TO_SPACE DEPTHWISE_CONV_2D DEQUANTIZE DIV
    DYNAMIC_UPDATE_SLICE ELU EMBEDDING_LOOKUP EQUAL EXP EXPAND_DIMS FILL FLOOR FLOOR_DIV FLOOR_MOD FULLY_CONNECTED GATHER GATHER_ND
    GREATER GREATER_EQUAL HARD_SWISH IF L2_NORMALIZATION L2_POOL_2D LEAKY_RELU LESS LESS_EQUAL LOG LOG_SOFTMAX LOGICAL_AND
    LOGICAL_NOT LOGICAL_OR LOGISTIC MAX_POOL_2D MAXIMUM MEAN MINIMUM MIRROR_PAD MUL NEG NOT_EQUAL PACK PAD PADV2 PRELU QUANTIZE
    READ_VARIABLE REDUCE_MAX REDUCE_MIN RELU RELU6 RESHAPE RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_V2 ROUND RSQRT
    SELECT_V2 SHAPE SIN SLICE SOFTMAX SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPLIT SPLIT_V SQRT SQUARE SQUARED_DIFFERENCE SQUEEZE
    STRIDED_SLICE SUB SUM SVDF TANH TRANSPOSE TRANSPOSE_CONV UNIDIRECTIONAL_SEQUENCE_LSTM UNPACK VAR_HANDLE WHILE
    ZEROS_LIKE"""
OPERATORS = frozenset(_OPERATORS.split())
"""Builtin operations with a tflite-micro kernel, for some types at least."""


@dataclass(frozen=True)
class MicroOptions:
    """Limits of the microcontroller.

    Attributes:
        arena_bytes: RAM for the arena; flash_bytes: for the model. 0: unlimited.
        calibration_rows, max_accuracy_drop: as in `quantize`, if the model is not static int8 already.
    """

    arena_bytes: int = bounded(0, 0, 2**31)
    flash_bytes: int = bounded(0, 0, 2**31)
    calibration_rows: int = bounded(256, 1, 100_000)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


def compile_model(model: StepModel, data: Data, options: MicroOptions, context: Context) -> StepModel:
    """`model` as static int8, verified to run in tflite-micro; a file that is static int8 already is not changed.

    Raises:
        StepRefused: quantization is refused, tflite-micro does not run the file, it needs too much memory, or its accuracy
            there is below float32 by more than the bound.
    """
    if model.tflite is None or model.precision != "static-int8":
        quantization = quantize.QuantizeOptions(
            "static-int8", options.calibration_rows, options.max_accuracy_drop
        )
        model = quantize.step(model, data, quantization, context)
    assert model.tflite is not None  # guaranteed by `quantize.step`
    require_operators(model.tflite)
    context.on_progress({"step": "tflite-micro"})
    arena_bytes, logits = run(model.tflite, data.x_test)
    require_space("arena", arena_bytes, options.arena_bytes, "fewer or narrower channels in the first layers")
    require_space("model", len(model.tflite), options.flash_bytes, "a smaller student, or `structured`")
    scored = score(logits, data.y_test)
    expected, figure = report.quality(model.module, data.x_test, data.y_test), scored.quality_name
    quantize.require_accuracy(expected, scored.quality, options.max_accuracy_drop, "tflite-micro", figure)
    facts = {
        **model.facts,
        **flatbuffer.facts(model.tflite),
        "arena_bytes": arena_bytes,
        f"micro_{figure}": scored.quality,
        f"float32_{figure}": expected,
    }
    return replace(model, facts=facts)


def require_operators(tflite: bytes) -> None:
    """Raises StepRefused naming the operations without a tflite-micro kernel."""
    missing = sorted({operation.kind for operation in flatbuffer.operations(tflite)} - OPERATORS)
    if missing:
        raise StepRefused(f"tflite-micro has no {', '.join(missing)}; choose a model without it")


def require_space(what: str, needed: int, limit: int, remedy: str) -> None:
    """Raises StepRefused if more bytes are needed than `limit`; 0 is unlimited."""
    if limit and needed > limit:
        raise StepRefused(f"the {what} needs {needed:,} bytes, {limit:,} are allowed; try {remedy}")


def run(tflite: bytes, x: npt.NDArray[Any]) -> tuple[int, npt.NDArray[np.float32]]:
    """The bytes of the arena, and the logits [N, (T,) classes], dequantized, of rows [N, …] in tflite-micro, in a separate process.

    Raises:
        StepRefused: with the interpreter's own message.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / name for name in ("model.tflite", "rows.npy", "logits.npy")]
        files[0].write_bytes(tflite)
        np.save(files[1], x, allow_pickle=False)
        command = [sys.executable, "-P", "-m", "models.compress.micro_interpreter", *map(str, files)]
        try:
            answer = run_once(tie_to_parent(command), SECONDS)
        except ProcessFailed as failure:
            raise StepRefused(f"tflite-micro does not run the file: {_reason(failure)}") from None
        return int(answer["arena_bytes"]), np.load(files[2], allow_pickle=False)


def _reason(failure: ProcessFailed) -> str:
    """The interpreter's message: it precedes the traceback on standard error, which only says that it failed."""
    if not failure.status or failure.status < 0:
        return str(failure)
    lines = [line.strip() for line in failure.output.splitlines() if line.strip()]
    traceback = next((index for index, line in enumerate(lines) if line.startswith("Traceback")), len(lines))
    return "; ".join(lines[:traceback] or lines[-1:])[:400]
