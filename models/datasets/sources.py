"""The one way to load a data set by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.contract import contradiction
from edge_client.data.labels import standardised
from edge_client.wire.schema import DataSchema
from models.datasets import described_table, notation, own, table
from models.datasets.columns import TextRules
from models.datasets.dataset import DataError, Dataset
from models.datasets.names import KEYS, check_name, is_code
from models.datasets.shipped import digits, mnist, phrasebank, shakespeare, synthetic, synthetic_clients
from models.tasks import TaskKind


def from_settings(
    settings: Mapping[str, Any],
    *,
    data_dir: Path | None = None,
    seed: int = 0,
    clients: int | None = None,
    schema: DataSchema | None = None,
    folder: Path | None = None,
) -> Dataset:
    """The data set that the `KEYS` of a table `[data]` describe; keys that are missing or None have their defaults.

    `schema`: of the model that its rows are for. A table is read by it; other data has to be what it says. `folder`: as `load`.

    Raises:
        DataError: as `load`; or the data is not what the schema says.
    """
    if schema is not None and schema.kind == "table":
        return _by_schema(settings, seed, schema)
    given = {key: settings[key] for key in KEYS if settings.get(key) is not None}
    reading = table.Reading(
        scale=given.pop("scale", None),
        fixed=given.pop("fixed", {}),
        units=given.pop("units", {}),
        texts=TextRules(**given.pop("categories", {})),
        encoding=given.pop("encoding", None),
    )
    name = given.pop("dataset")
    dataset = load(
        name, data_dir=data_dir, seed=seed, clients=clients, reading=reading, folder=folder, **given
    )
    return dataset if schema is None else _for_model(dataset, schema)


def _for_model(dataset: Dataset, schema: DataSchema) -> Dataset:
    """The data set with quantities scaled as the model predicts them, if it is what the model was trained on."""
    if difference := contradiction(schema, dataset.described):
        raise DataError(f"data set {dataset.name!r}: {difference}")
    if schema.label_scale in (None, dataset.label_scale) or dataset.label_scale is None:
        return dataset
    (mean, deviation), own = schema.label_scale, dataset.label_scale
    y = standardised(dataset.y.astype(np.float64) * own[1] + own[0], (mean, deviation))
    return replace(dataset, y=y, label_scale=(mean, deviation))


def _by_schema(settings: Mapping[str, Any], seed: int, schema: DataSchema) -> Dataset:
    name, path = settings["dataset"], settings.get("path")
    if name != "csv" or path is None:
        raise DataError(
            f"data set {name!r}: the model was trained on a table with the label {schema.label!r}; expected a table, such as table.csv"
        )
    return described_table.load(Path(path), seed, schema, settings)


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    seed: int = 0,
    clients: int | None = None,
    path: Path | str | None = None,
    label: str = "label",
    site: str | None = None,
    split: str | None = None,
    features: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    task: str | None = None,
    reading: table.Reading = table.Reading(),  # noqa: B008 - a frozen value
    length: int = 32,
    vocab: int = 2048,
    folder: Path | None = None,
) -> Dataset:
    """All rows of a data set. Equal arguments give equal bytes.

    Args:
        name: one of `NAMES`, `synthetic(shape=[…], classes=…, samples=…)`, `synthetic(alpha, beta)`, or `package.module:load`.
        data_dir: where downloaded files lie; the current folder when None.
        seed: of what is held out, and of synthetic data.
        clients: how many clients synthetic data is to serve.
        task: of a csv: `regression` predicts the label as a quantity; other data says itself what its labels are.
        path: of a csv or npz; `label` to `reading` are for `table.load`.
        length: tokens in a row of text.
        vocab: word ids of phrasebank, padding and unknown words included.
        folder: gets the inputs of synthetic data as a file if they are large; None: all is in memory.

    Raises:
        DataError: unknown name, missing or damaged file, or wrong content; names the place and what to do.
    """
    check_name(name)
    if is_code(name):
        return own.load(name, data_dir, seed)
    _check_lengths(length, vocab)
    call = notation.parse(name)
    match call.name:
        case "digits":
            return digits.load(seed)
        case "mnist":
            return mnist.load(data_dir, seed)
        case "shakespeare":
            return shakespeare.load(data_dir, length)
        case "phrasebank":
            return phrasebank.load(data_dir, seed, length, vocab)
        case "synthetic":
            if call.positional:
                return synthetic_clients.load(call, clients, seed)
            return synthetic.load(call, clients, seed, folder)
    if path is None:
        raise DataError(f"data set {call.name!r} needs `path`, the file to read")
    if call.name == "npz":
        return own.read_archive(Path(path), seed)
    roles = table.Columns(label, site, split, features, exclude)
    kind: TaskKind = "regression" if task == "regression" else "classification"
    return table.load(Path(path), seed, roles, reading, kind)


def _check_lengths(length: int, vocab: int) -> None:
    if length < 1 or vocab <= phrasebank.FIRST_WORD:
        raise DataError(
            f"length = {length}, vocab = {vocab}: expected at least 1 and {phrasebank.FIRST_WORD + 1}"
        )
