"""Predictions of a finished run's model in the calling process, which imports the model's framework and code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from edge_client.data.connector import DataProblem
from edge_client.infer.runtime import InvalidRows
from edge_client.serving.predict import decode
from edge_client.serving.rows import read_inputs
from edge_client.train.evaluation import EVALUATION_ROWS
from edge_client.train.trainer import Runtime
from edge_client.wire import schema as schemas
from models import user_code
from strategies.params import Params


class Predictions(NamedTuple):
    """Predictions for rows: `labels, probabilities = result.predict(x)`.

    `labels`: the most probable class of each row, [N]: its name where the data has names, else its index; for next tokens
    [N, T]; for regression the quantity in its own unit, float64. `probabilities`: float64 [N, classes]; for next tokens
    [N, T, classes]; None for regression.
    """

    labels: npt.NDArray[Any]
    probabilities: npt.NDArray[np.float64] | None


def predict(report: Mapping[str, Any], params: Params, x: Any) -> Predictions:
    """Predictions for rows x: an array [N, …] or a single row, as the model takes them; or a file as `fedloop-edge predict` reads it.

    Raises:
        UserError: the rows do not fit the model, it cannot be built here, or its output is not finite.
    """
    data, schema = report["data"], schemas.from_document(report["data"]["schema"])
    experiment = Experiment.model_validate(report["experiment"])
    if isinstance(x, str | Path):
        try:
            x = read_inputs(Path(x), schema, f"model {experiment.model.name!r}").x
        except DataProblem as error:
            raise UserError(f"predict: {error}") from error
    rows = _rows(x, schema)
    shape = {
        "input_dtype": schema.input_dtype,
        **{key: data[key] for key in ("input_shape", "classes", "task")},
    }
    runtime = _runtime(experiment, shape)
    chunks = [
        runtime.logits(params, rows[start : start + EVALUATION_ROWS])
        for start in range(0, len(rows), EVALUATION_ROWS)
    ]
    try:
        labels, probabilities = decode(np.concatenate(chunks), f"model {experiment.model.name!r}", schema)
    except InvalidRows as error:
        raise UserError(f"predict: {error}") from error
    if probabilities is not None and schema.classes:
        labels = np.array(schema.classes)[labels]
    return Predictions(labels, probabilities)


def _rows(x: Any, schema: schemas.DataSchema) -> npt.NDArray[Any]:
    rows, shape, dtype = np.asarray(x), schema.input_shape, schema.input_dtype
    rows = rows[None] if rows.shape == shape else rows
    if rows.shape[1:] != shape or not len(rows):
        raise UserError(
            f"predict: x has shape {list(rows.shape)}, expected [rows, {', '.join(map(str, shape))}] with at least one row"
        )
    kinds = "iu" if dtype == "int32" else "fiub"
    if rows.dtype.kind not in kinds or not np.isfinite(rows).all():
        raise UserError(f"predict: x is {rows.dtype}, expected finite numbers as {dtype}")
    return np.ascontiguousarray(rows, dtype)


def _runtime(experiment: Experiment, shape: Mapping[str, Any]) -> Runtime:
    from models.zoo import KerasSpec
    from models.zoo.resolve import ModelNotFound, find

    described = experiment.model.describe(shape)
    options, input_shape = described.pop("options"), tuple(described.pop("input_shape"))
    try:
        spec = find(**described, **options, input_shape=input_shape)
    except (ModelNotFound, user_code.UserCodeError) as error:
        raise UserError(f"predict: {error}") from error
    if isinstance(spec, KerasSpec):
        from edge_client.train.tensorflow_trainer import TensorFlowRuntime

        model = spec.build(0)
        return TensorFlowRuntime(model, trainable=model.trainable)
    from edge_client.train.torch_trainer import TorchRuntime

    return TorchRuntime(spec.build(0), spec.loss)
