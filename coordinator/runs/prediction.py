"""Predictions of a finished run's model in the calling process, which imports the model's framework and code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.errors import UserError
from coordinator.experiments.objects import is_frame
from coordinator.experiments.schema import Experiment
from edge_client.data.connector import DataProblem
from edge_client.infer.runtime import InvalidRows
from edge_client.serving import rows
from edge_client.serving.predict import decode
from edge_client.serving.records import read_records
from edge_client.serving.rows import Inputs, read_inputs, site_moments
from edge_client.train.evaluation import EVALUATION_ROWS
from edge_client.train.trainer import Runtime
from edge_client.wire import schema as schemas
from models import user_code
from strategies.params import Params


class Predictions(NamedTuple):
    """Predictions for rows: `labels, probabilities = result.predict(x)`.

    `labels`: the most probable class of each row, [N]: its name where the data has names, else its index; for next tokens
    [N, T], of texts [N]; for regression the quantity in its own unit, float64. `probabilities`: float64 [N, classes]; for next tokens
    [N, T, classes]; None for regression.
    """

    labels: npt.NDArray[Any]
    probabilities: npt.NDArray[np.float64] | None


class Reading(NamedTuple):
    """How rows in natural form are read.

    `site_rows`: table of a site's training rows, whose means and deviations scale the numbers. `leave_out`: columns that are not
    inputs. `encoding`: of files; None: as the training table's.
    """

    site_rows: Path | None = None
    leave_out: tuple[str, ...] = ()
    encoding: str | None = None


_AS_IT_IS = Reading()


def predict(report: Mapping[str, Any], params: Params, x: Any, reading: Reading = _AS_IT_IS) -> Predictions:
    """Predictions for rows x, in one of these forms:

    - an array [N, …] or a single row, as the model takes them
    - a pandas DataFrame or a list of dicts, with the columns of the training table in natural form; a list of texts
    - the path of a file, which is read as `fedloop-edge predict` reads it

    Raises:
        UserError: the rows do not fit the model, it cannot be built here, or its output is not finite.
    """
    data, schema = report["data"], schemas.from_document(report["data"]["schema"])
    experiment = Experiment.model_validate(report["experiment"])
    try:
        inputs = _inputs(x, schema, f"model {experiment.model.name!r}", reading)
    except DataProblem as error:
        raise UserError(f"predict: {error}") from error
    x = _rows(inputs.x, schema)
    shape = {
        "input_dtype": schema.input_dtype,
        **{key: data[key] for key in ("input_shape", "classes", "task")},
    }
    runtime = _runtime(experiment, shape)
    chunks = [
        runtime.logits(params, x[start : start + EVALUATION_ROWS])
        for start in range(0, len(x), EVALUATION_ROWS)
    ]
    logits = np.concatenate(chunks)
    if inputs.last is not None:
        logits = logits[np.arange(len(logits)), inputs.last]
    try:
        labels, probabilities = decode(logits, f"model {experiment.model.name!r}", schema)
    except InvalidRows as error:
        raise UserError(f"predict: {error}") from error
    if probabilities is not None and schema.classes:
        labels = np.array(schema.classes)[labels]
    return Predictions(labels, probabilities)


def _inputs(x: Any, schema: schemas.DataSchema, model: str, reading: Reading) -> Inputs:
    moments = None
    if reading.site_rows is not None:
        moments = site_moments(reading.site_rows, schema, reading.encoding)
    known = rows.Reading(reading.leave_out, reading.encoding, moments)
    if isinstance(x, str | Path):
        return read_inputs(Path(x), schema, model, known)
    if reading.encoding is not None and reading.site_rows is None:
        raise DataProblem("encoding: is that of a file; x is none")
    if is_frame(x):
        return read_records(x.to_dict("records"), schema, model, known)
    if isinstance(x, list) and x and all(isinstance(each, Mapping | str) for each in x):
        return read_records(x, schema, model, known)
    if reading != _AS_IT_IS:
        raise DataProblem(
            "x is an array, taken as the model takes it; site_rows, leave_out and encoding are for rows in natural form"
        )
    return Inputs(x, None)


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
