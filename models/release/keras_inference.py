"""A Keras model with its params as a `.tflite` for inference, in float32 or quantized.

    1. read the model, with the job's params or, from a `.keras` file, its own
    2. convert it to float32 with TensorFlow, `infer(x[1, …]) -> logits[1, …]`, and compare it with Keras on test rows
    3. quantize it like any model (`models.compress.quantization.recipes`), and measure the file's accuracy

The file leaves out what only training needs (dropout, batch statistics), so more layers are supported here than in an artifact
for training. A layer without a builtin operation is refused by name.

Run as `python -P -m models.release.keras_inference JOB.json`, with arrays `x_train` to calibrate with, `x_test` and `y_test`,
and `params` to replace the model's own. Writes `model.tflite` and `model.safetensors` into `out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from torch import nn

from edge_client.files import write_durably
from edge_client.processes import process
from edge_client.train.tensorflow_import import tf
from models import job as jobs
from models.compress.quantization import quantize
from models.compress.quantization.recipes import SIGNATURE
from models.compress.report import logits as logits_of
from models.compress.step import Data
from models.conversion.keras import convert_functions
from models.job import JobError, JobFile
from models.zoo.tensorflow.keras import FunctionalModel, KerasSpec

Params = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class KerasOptions(quantize.QuantizeOptions):
    """Those of the compression step `quantize`, with the precisions that apply to Keras models."""

    precision: Literal["float32", "float16", "weight-int8", "dynamic-int8", "static-int8"] = "static-int8"


class FloatModel(nn.Module):
    """A Keras model with its params as a torch module that computes logits."""

    def __init__(self, model: FunctionalModel, params: Params) -> None:
        super().__init__()
        weights = {name: tf.constant(value) for name, value in params.items()}
        self._infer = tf.function(lambda x: model.logits(weights, x), reduce_retracing=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.array(self._infer(tf.convert_to_tensor(x.numpy()))))


def run(path: Path, report: process.Report) -> None:
    """Runs the job in the file `path`."""
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = job.any_spec(), job.options(KerasOptions)
    if not isinstance(spec, KerasSpec):
        raise JobError(f"{job.path}: model {spec.name!r} is not a Keras model")
    x_train, x_test = (job.rows(f"x_{part}", spec) for part in ("train", "test"))
    data = Data(x_train, job.labels("y_train", spec, x_train), x_test, job.labels("y_test", spec, x_test))
    model, params = read_model(job, spec)
    report(stage="keras", step="convert")
    float32 = to_tflite(model, params)
    rows = x_test[: quantize.COMPARED]
    error = quantize.require_same_logits(logits_of(float32, rows), logits_of(FloatModel(model, params), rows))
    precision, tflite, facts = quantize.from_float32(
        float32, data, options, lambda line: report(stage="keras", **line)
    )
    write_durably(job.out / "model.safetensors", safetensors.numpy.save(dict(params)))
    write_durably(job.out / "model.tflite", tflite)
    jobs.write_result(job.out, {"precision": precision, "max_abs_error": error, **facts})


def read_model(job: JobFile, spec: KerasSpec) -> tuple[FunctionalModel, Params]:
    """The job's model and its params.

    Raises:
        JobError: the params are unreadable, or of another model.
        KerasUnfit: the model cannot be built for these rows.
    """
    model = spec.build(0)
    own = model.params()
    if "params" not in job.settings:
        return model, own
    path = job.file("params", job.settings["params"])
    return model, require_params(model, jobs.read_params(path), path)


def require_params(
    model: FunctionalModel, params: Mapping[str, npt.NDArray[Any]], path: Path
) -> dict[str, npt.NDArray[np.float32]]:
    """The params from the file `path` in the order of the model's own.

    Raises:
        JobError: they are of another model.
    """
    own = model.params()
    expected, actual = ({name: v.shape for name, v in each.items()} for each in (own, params))
    for name in sorted(set(expected) | set(actual)):
        if expected.get(name) != actual.get(name):
            raise JobError(
                f"{path}: {name} is {actual.get(name, 'absent')}, expected {expected.get(name, 'no such weight')} for "
                f"model {model.spec.name!r}"
            )
    return {name: params[name].astype(np.float32) for name in own}


def to_tflite(model: FunctionalModel, params: Params) -> bytes:
    """The float32 `.tflite` with its params.

    Raises:
        NotConvertible: an operation has no builtin equivalent.
    """
    weights = {name: tf.constant(value) for name, value in params.items()}
    x = tf.TensorSpec((1, *model.spec.input_shape), model.spec.input_dtype, "x")
    infer = tf.function(lambda x: {"logits": model.logits(weights, x)}, input_signature=[x], autograph=False)
    return convert_functions(**{SIGNATURE: infer})


if __name__ == "__main__":
    process.serve(run)
