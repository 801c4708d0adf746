"""Predictions of a trained model on the rows of a file, in a worker process: reading, computing and writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
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
_CHUNK_BYTES = 2**28
"""Of the logits of texts that are computed together."""


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
    if inputs.last is None:
        chunks = range(0, len(inputs.x), _CHUNK_ROWS)
        computed = np.concatenate([logits(inputs.x[start : start + _CHUNK_ROWS]) for start in chunks])
    else:
        computed = _after_texts(logits, inputs.x, inputs.last, request["description"] or {})
        inputs = replace(inputs, last=np.zeros(len(computed), np.int64))
    found = predict.of_inputs(computed, name, schema, inputs)
    if request["out"] is not None:
        predict.write_predictions(Path(request["out"]), found)
    metrics = predict.errors(found, inputs.y, schema)
    return {
        "predictions": [asdict(each) for each in found],
        "lines": [each.line() for each in found],
        "accuracy": predict.accuracy(found, inputs.y),
        **({} if metrics is None else {"metrics": metrics}),
    }


def _after_texts(
    logits: Logits, x: npt.NDArray[Any], last: npt.NDArray[np.int64], description: Mapping[str, Any]
) -> npt.NDArray[np.float32]:
    """The logits [N, 1, V] after the last token of each text. Memory holds those of all tokens of a few texts only.

    `description`: of the model; one that takes texts of any length is spared the padding.
    """
    if _takes_any_length(description):
        x = x[:, : int(last.max()) + 1]
    found: list[npt.NDArray[np.float32]] = []
    rows = 1
    while len(found) < len(x):
        start = len(found)
        chunk = logits(x[start : start + rows])
        found += [chunk[row, None, each] for row, each in enumerate(last[start : start + rows].tolist())]
        rows = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // chunk[:1].nbytes))
    return np.stack(found)


def _takes_any_length(description: Mapping[str, Any]) -> bool:
    """Whether tokens see no later ones, and there may be any number of them; blocks of attention need whole blocks."""
    options = description.get("options", {})
    return description.get("name") == "gpt" and options.get("attention", "full") == "full"


def _reading(request: Mapping[str, Any], schema: DataSchema) -> rows.Reading:
    path, encoding = request["site_rows"], request["encoding"]
    moments = None if path is None else rows.site_moments(Path(path), schema, encoding)
    return rows.Reading(tuple(request["leave_out"]), request["encoding"], moments)
