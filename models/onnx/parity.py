"""Compares the logits of an ONNX file with those of its PyTorch module, row by row, in onnxruntime.

Every row runs alone and in a batch, which also detects a batch axis that is not an axis of rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from torch import nn

from models.zoo import ModelSpec

ROWS = 16
ABSOLUTE, RELATIVE = 1e-5, 1e-4
"""Tolerance of a logit, the second as a share of the largest one of its row: for float32 sums in another order."""

_INPUT_TYPES = {"tensor(float)": "float32", "tensor(int32)": "int32", "tensor(int64)": "int64"}


class LogitsDiffer(ValueError):
    """The file's logits differ from the module's; the message names the first row."""


def require_same_logits(file: bytes | Path, module: nn.Module, spec: ModelSpec, seed: int = 0) -> float:
    """The largest difference between a logit of the file and of the module, which is in evaluation mode.

    Args:
        file: with one input. A path if it has external weights.

    Raises:
        LogitsDiffer: a row differs by more than rounding, or the file cannot run.
    """
    try:
        return _difference(_session(file), module, spec, seed)
    except LogitsDiffer:
        raise
    except Exception as error:  # onnxruntime has a class for each status, without a common one
        raise LogitsDiffer(
            f"onnxruntime {onnxruntime.__version__} cannot run it: {' '.join(str(error).split())[:300]}"
        ) from None


def _difference(session: Any, module: nn.Module, spec: ModelSpec, seed: int) -> float:
    (model_input,) = session.get_inputs()
    dtype = _INPUT_TYPES[model_input.type]
    fixed = model_input.shape[0] if isinstance(model_input.shape[0], int) else None
    rows = _rows(spec, ROWS if fixed is None else -(-ROWS // fixed) * fixed, seed)
    with torch.no_grad():
        reference = module(torch.from_numpy(rows)).numpy()
    if not np.isfinite(reference).all():
        raise LogitsDiffer("the model's own logits are not finite on ordinary rows")
    worst = 0.0
    for batch in (fixed,) if fixed is not None else (1, len(rows)):
        for start in range(0, len(rows), batch):
            inputs = rows[start : start + batch].astype(dtype)
            answers = session.run(None, {model_input.name: inputs})[0]
            expected = reference[start : start + batch]
            if answers.shape != expected.shape:
                raise LogitsDiffer(f"{len(inputs)} rows give {answers.shape}, expected {expected.shape}")
            for index, (answer, logits) in enumerate(zip(answers, expected, strict=True), start):
                worst = max(worst, _row_difference(answer, logits, index))
    return worst


def _row_difference(answer: npt.NDArray[Any], logits: npt.NDArray[Any], index: int) -> float:
    difference = np.abs(answer.astype(np.float64) - logits)
    allowed = ABSOLUTE + RELATIVE * float(np.abs(logits).max())
    if not (difference <= allowed).all():  # also false for NaN
        raise LogitsDiffer(
            f"row {index} of the test rows differs by {float(difference.max()):.3g} from PyTorch's logits, "
            f"expected at most {allowed:.3g}"
        )
    return float(difference.max())


def _rows(spec: ModelSpec, count: int, seed: int) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    shape = (count, *spec.input_shape)
    if spec.input_dtype == "int32":
        return rng.integers(0, spec.tokens, shape, dtype=np.int32)
    return rng.normal(0.5, 0.5, shape).astype(np.float32)


def _session(file: bytes | Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        file if isinstance(file, bytes) else str(file), options, providers=["CPUExecutionProvider"]
    )
