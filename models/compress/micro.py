"""For microcontrollers: static int8 that tflite-micro runs in a given arena, and the C array that firmware is built with.

tflite-micro allocates everything it needs in one array of bytes, the arena, when it starts; that is the model's share of a
microcontroller's RAM, while the `.tflite` itself lies in flash. The file is run in the interpreter itself, in a process of its
own, which may end with it: operations that it lacks and files of other precisions are refused with what it says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.train.trainer import score
from models.compress import quantize, report, stored
from models.compress.step import Context, Data, Model, StepRefused
from models.export import apart
from models.options import bounded

SECONDS = 600
"""How long the interpreter may take for all rows."""

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
"""Builtin operations that tflite-micro has kernels for, in some types at least."""


@dataclass(frozen=True)
class Options:
    """What the microcontroller has.

    Attributes:
        arena_bytes: RAM for the arena, at most; flash_bytes: for the model. 0: not bounded.
        calibration_rows, max_accuracy_drop: as in `quantize`, where the model is not static int8 already.
    """

    arena_bytes: int = bounded(0, 0, 2**31)
    flash_bytes: int = bounded(0, 0, 2**31)
    calibration_rows: int = bounded(256, 1, 100_000)
    max_accuracy_drop: float = bounded(0.02, 0.0, 1.0)


def microcontroller(model: Model, data: Data, options: Options, context: Context) -> Model:
    """`model` as static int8 that was seen to run in tflite-micro; a file that is static int8 already is taken as it is.

    Raises:
        StepRefused: quantization is refused, tflite-micro does not run the file, it needs more than there is, or it is
            less accurate there than float32 by more than the bound.
    """
    if model.tflite is None or model.precision != "static-int8":
        how = quantize.Options("static-int8", options.calibration_rows, options.max_accuracy_drop)
        model = quantize.step(model, data, how, context)
    assert model.tflite is not None  # what `quantize.step` promises
    require_operators(model.tflite)
    context.tell({"step": "tflite-micro"})
    ran = run(model.tflite, data.x_test)
    require_room(
        "arena", ran.arena_bytes, options.arena_bytes, "fewer or narrower channels in the first layers"
    )
    require_room("model", len(model.tflite), options.flash_bytes, "a smaller student, or `structured`")
    accuracy = float(score(ran.logits, data.y_test).accuracy)
    expected = report.accuracy(model.module, data.x_test, data.y_test)
    quantize.require_accuracy(expected, accuracy, options.max_accuracy_drop, "tflite-micro")
    facts = {
        **model.facts,
        **stored.facts(model.tflite),
        "arena_bytes": ran.arena_bytes,
        "micro_accuracy": accuracy,
        "float32_accuracy": expected,
    }
    return replace(model, facts=facts)


def require_operators(tflite: bytes) -> None:
    """Raises StepRefused naming the operations that tflite-micro has no kernel for."""
    missing = sorted({operation.kind for operation in stored.operations(tflite)} - OPERATORS)
    if missing:
        raise StepRefused(f"tflite-micro has no {', '.join(missing)}; choose a model without it")


def require_room(what: str, needed: int, given: int, remedy: str) -> None:
    """Raises StepRefused when more bytes are needed than given; 0 given is no bound."""
    if given and needed > given:
        raise StepRefused(f"the {what} needs {needed:,} bytes, {given:,} are allowed; try {remedy}")


@dataclass(frozen=True)
class Ran:
    """What tflite-micro made of a file. `logits`: [N, (T,) classes], dequantized."""

    arena_bytes: int
    logits: npt.NDArray[np.float32]


def run(tflite: bytes, x: npt.NDArray[Any]) -> Ran:
    """Runs the file on rows [N, …] in tflite-micro, in a process of its own.

    Raises:
        StepRefused: with the interpreter's own words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / name for name in ("model.tflite", "rows.npy", "logits.npy")]
        files[0].write_bytes(tflite)
        np.save(files[1], x, allow_pickle=False)
        command = [sys.executable, "-P", "-m", "models.compress.micro_process", *map(str, files)]
        try:
            done = apart.run(command, SECONDS)
        except subprocess.TimeoutExpired:
            raise StepRefused(f"tflite-micro was not done with {len(x)} rows after {SECONDS} s") from None
        if done.returncode:
            raise StepRefused(f"tflite-micro does not run the file: {_reason(done)}")
        said = json.loads(done.stdout.splitlines()[-1])
        return Ran(int(said["arena_bytes"]), np.load(files[2], allow_pickle=False))


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The interpreter says what it lacks on standard error, before the exception that only says that it failed."""
    if done.returncode < 0:
        return f"its process was ended by signal {-done.returncode}"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    traceback = next((place for place, line in enumerate(said) if line.startswith("Traceback")), len(said))
    return "; ".join(said[:traceback] or said[-1:])[:400]
