"""Predictions of a trained model on the rows of a file, in a worker process: reading, computing and writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.infer import golden_check
from edge_client.infer import runtime as releases
from edge_client.serving import predict, rows
from edge_client.wire import schema as schemas
from edge_client.wire.schema import DataSchema

Logits = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]

_CHUNK_ROWS = 4096


def count_rows(request: Mapping[str, Any]) -> dict[str, Any]:
    """The number of rows in the files of a request as of `run`, which are read as for predictions.

    Raises:
        DataProblem: the rows do not fit the schema. UserError: an option does not.
    """
    schema = schemas.from_document(request["schema"])
    reading = _reading(request, schema)
    parts = [rows.read_inputs(Path(each), schema, request["model"], reading) for each in request["files"]]
    return {"rows": sum(len(part.x) for part in parts)}


def run(request: Mapping[str, Any], logits: Logits | None) -> dict[str, Any]:
    """The predictions for the rows of files, a line each for people, and their accuracy where the files have the classes; of
    quantities R2, MAE and RMSE as `metrics`.

    Args:
        request: `files`; `model`, its name in messages; `schema`; `release`, its folder, or null; `site_rows`, the table of a
            site's training rows, or null; `leave_out` and `encoding` as in `rows.Reading`; `out`, a file to write, or null.
        logits: of the model; None of a release.

    Raises:
        DataProblem, InvalidRows: the rows do not fit the model. UserError: an option does not.
        ManifestError, SelfTestFailed: the release cannot be used here.
    """
    schema, name = schemas.from_document(request["schema"]), request["model"]
    reading = _reading(request, schema)
    files = [Path(each) for each in request["files"]]
    if request["release"] is not None:
        loaded = releases.load(Path(request["release"]))
        golden_check.require(loaded)
        inputs = rows.concatenate([rows.read_rows(each, loaded.manifest, reading) for each in files])
        logits = loaded.predict
    else:
        inputs = rows.concatenate([rows.read_inputs(each, schema, name, reading) for each in files])
    assert logits is not None, "a release, or a model of its own"
    parts = [logits(inputs.x[start : start + _CHUNK_ROWS]) for start in range(0, len(inputs.x), _CHUNK_ROWS)]
    found = predict.of_inputs(np.concatenate(parts), name, schema, inputs)
    if request["out"] is not None:
        predict.write_predictions(Path(request["out"]), found)
    metrics = predict.errors(found, inputs.y, schema)
    return {
        "predictions": [asdict(each) for each in found],
        "lines": [each.line() for each in found],
        "accuracy": predict.accuracy(found, inputs.y),
        **({} if metrics is None else {"metrics": metrics}),
    }


def _reading(request: Mapping[str, Any], schema: DataSchema) -> rows.Reading:
    path, encoding = request["site_rows"], request["encoding"]
    moments = None if path is None else rows.site_moments(Path(path), schema, encoding)
    return rows.Reading(tuple(request["leave_out"]), request["encoding"], moments)
