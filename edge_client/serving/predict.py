"""Predictions with the device's active release."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.errors import UserError
from edge_client.infer.runtime import InvalidRows, LoadedRelease, Predictor
from edge_client.ota import slots
from edge_client.ota.transitions import Pointer
from edge_client.serving.rows import Inputs
from edge_client.serving.texts import token_name
from edge_client.train.evaluation import figures_of, score, softmax
from edge_client.wire.schema import DataSchema
from edge_client.wire.strict import printable


class NoRelease(UserError):
    """This device runs no release of the model."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one row, or for each position of a sequence.

    Attributes:
        label: the class with the largest logit; probability: its softmax.
        class_name: of the label; probabilities: of all classes, by name; both empty for a sequence.
        is_token: whether the classes are tokens, the next ones of a text.
        source: the file of an image; empty for other rows.
        value: of a model that predicts a quantity, in its own unit; then the others say nothing.
    """

    label: int | list[int]
    probability: float | list[float]
    class_name: str = ""
    probabilities: Mapping[str, float] = field(default_factory=dict)
    value: float | None = None
    source: str = ""
    is_token: bool = False

    def line(self, most: int = 5) -> str:
        """One line for people: the class and its probability; of texts to continue the `most` most likely tokens."""
        if self.value is not None:
            return f"{self.value:.6g}"
        if isinstance(self.label, list) and isinstance(self.probability, list):
            pairs = zip(self.label, self.probability, strict=True)
            return "  ".join(f"{label} {probability:.4f}" for label, probability in pairs)
        if self.is_token:
            ranked = sorted(self.probabilities.items(), key=lambda pair: -pair[1])[:most]
            return "  ".join(f"{token!r} {probability:.4f}" for token, probability in ranked)
        place = f"{printable(self.source)}: " if self.source else ""
        return f"{place}{printable(self.class_name, 200)} {self.probability:.4f}"


def active_release(state_dir: Path, model: str | None = None) -> Path:
    """The folder of the active release. `model`: required if the device runs several.

    Raises:
        NoRelease: none is installed yet, or the installed one no longer runs.
        UserError: the device runs several and none is named, or does not know the named one.
    """
    pointers = {name: slots.read(state_dir, name) for name in slots.models(state_dir)}
    running = [name for name, pointer in pointers.items() if pointer.active is not None]
    choices = running or list(pointers)
    if model is None and len(choices) > 1:
        raise UserError(f"this device has several models; name one with --model: {', '.join(choices)}")
    chosen = model or next(iter(choices), None)
    if chosen is None:
        raise NoRelease(
            f"this device has no release yet, in {state_dir}; the daemon installs what it is told to run "
            "(fedloop-edge status); or give a folder with --release"
        )
    if chosen not in pointers:
        has = f"it has {', '.join(choices)}" if choices else "it has none yet"
        raise UserError(f"this device has no release of {chosen!r}; {has}; or give a folder with --release")
    pointer = pointers[chosen]
    if pointer.active is None:
        raise NoRelease(f"no version of {chosen} runs: {_inactive_reason(pointer)}")
    return slots.slot_folder(state_dir, chosen, pointer.active)


def _inactive_reason(pointer: Pointer) -> str:
    model, last = pointer.model, pointer.last
    if last is not None and last.standing in ("rolled_back", "failed"):
        reason = printable(last.words, 300)
        return f"{model}:{last.version} does not run here, and there is no other version: {reason}"
    return f"no release of {model} was installed yet"


def predict_inputs(loaded: Predictor, inputs: Inputs) -> list[Prediction]:
    """One prediction for each row that was read. Raises: as `predict`."""
    return of_inputs(loaded.predict(inputs.x), loaded.manifest.model, loaded.manifest.data_schema, inputs)


def of_inputs(logits: npt.NDArray[Any], model: str, schema: DataSchema, inputs: Inputs) -> list[Prediction]:
    """The predictions for rows that were read, with their files; of texts to continue, of the token after the last.

    Raises:
        InvalidRows: a logit is not finite. `model`: its name in the message.
    """
    if inputs.last is None:
        found = from_logits(logits, model, schema)
    else:
        names = [token_name(schema.text, index) for index in range(logits.shape[-1])] if schema.text else []
        ends = logits[np.arange(len(logits)), inputs.last]
        named = replace(schema, classes=tuple(names))
        found = [replace(each, is_token=True) for each in from_logits(ends, model, named)]
    if not inputs.sources:
        return found
    return [replace(each, source=source) for each, source in zip(found, inputs.sources, strict=True)]


def next_tokens(predictions: Sequence[Prediction], inputs: Inputs, schema: DataSchema) -> list[Prediction]:
    """Of predictions for every position of texts to continue, those after the last token of each."""
    assert inputs.last is not None and schema.text is not None, "texts to continue"
    found = []
    for each, last in zip(predictions, inputs.last.tolist(), strict=True):
        assert isinstance(each.label, list) and isinstance(each.probability, list), "of every position"
        label = each.label[last]
        name = token_name(schema.text, label)
        found.append(Prediction(label, each.probability[last], name, is_token=True))
    return found


def predict(loaded: LoadedRelease, x: npt.NDArray[Any]) -> list[Prediction]:
    """One prediction for each row.

    Raises:
        InvalidRows: the rows are invalid for the model, or its output is not finite.
    """
    return from_logits(loaded.predict(x), loaded.manifest.model, loaded.manifest.data_schema)


def from_logits(logits: npt.NDArray[Any], model: str, schema: DataSchema) -> list[Prediction]:
    """One prediction for each row of logits [N, (T,) classes].

    Raises:
        InvalidRows: a logit is not finite. `model`: its name in the message.
    """
    labels, probabilities = decode(logits, model, schema)
    if probabilities is None:
        return [Prediction(0, 1.0, value=value) for value in labels.tolist()]
    if logits.ndim > 2:
        best = probabilities.max(-1)
        return [
            Prediction(label.tolist(), probability.tolist())
            for label, probability in zip(labels, best, strict=True)
        ]
    names = [schema.class_name(index) for index in range(logits.shape[-1])]
    return [
        Prediction(
            int(label), float(shares[label]), names[label], dict(zip(names, shares.tolist(), strict=True))
        )
        for label, shares in zip(labels.tolist(), probabilities, strict=True)
    ]


def decode(
    logits: npt.NDArray[Any], model: str, schema: DataSchema
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64] | None]:
    """Indices of the classes [N, (T)] and probabilities [N, (T,) classes] of logits [N, (T,) classes].

    Of a model that predicts a quantity: the values [N] in their own unit, float64, and None.

    Raises:
        InvalidRows: a logit is not finite. `model`: its name in the message.
    """
    finite = np.isfinite(logits)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise InvalidRows(f"row {row}: {model} answers with a number that is not finite")
    if schema.label_scale is not None:
        mean, deviation = schema.label_scale
        return logits[:, 0].astype(np.float64) * deviation + mean, None
    return logits.argmax(-1), softmax(logits)


def accuracy(predictions: Sequence[Prediction], y: npt.NDArray[Any] | None) -> float | None:
    """The share of rows whose class is right; None without known classes, for sequences and for quantities."""
    if y is None or y.ndim != 1 or not len(y) or predictions[0].value is not None:
        return None
    return float(np.mean([each.label == known for each, known in zip(predictions, y.tolist(), strict=True)]))


def errors(
    predictions: Sequence[Prediction], y: npt.NDArray[Any] | None, schema: DataSchema
) -> dict[str, float | None] | None:
    """R2, MAE and RMSE of predicted quantities, in their own unit; None for classes, or without known quantities `y` [N]."""
    if schema.label_scale is None or y is None or not len(y):
        return None
    mean, deviation = schema.label_scale
    values = np.array([each.value for each in predictions], np.float64)
    return figures_of(score((values[:, None] - mean) / deviation, (y - mean) / deviation), deviation)


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Writes one row a prediction: its class, and the probability of every class, as `.csv`, `.json` or `.parquet`.

    Raises:
        UserError: another suffix, sequences, a missing library, or the file cannot be written.
    """
    rows: list[dict[str, Any]] = [
        ({"file": each.source} if each.source else {})
        | ({"class": each.class_name, **each.probabilities} if each.value is None else {"value": each.value})
        for each in predictions
    ]
    for name in ("class", "file"):
        if any(name in each.probabilities for each in predictions):
            raise UserError(
                f"--out {path}: a class is named {name!r}, as a column of the table is; --json prints the predictions"
            )
    if any(isinstance(each.label, list) for each in predictions):
        raise UserError(f"--out {path}: is for one class a row; of sequences, --json prints the predictions")
    try:
        match path.suffix:
            case ".csv":
                with path.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)
            case ".json":
                path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            case ".parquet":
                import pyarrow
                import pyarrow.parquet

                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            case _:
                raise UserError(f"--out {path}: expected a file named .csv, .json or .parquet")
    except ModuleNotFoundError:
        raise UserError(f"--out {path}: Parquet needs pyarrow: pip install 'fedloop[data]'") from None
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror}") from None
