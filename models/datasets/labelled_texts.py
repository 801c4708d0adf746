"""Texts with a class each: a table of which one column has the text and another one the class, encoded by a tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.quoting import quoted
from edge_client.serving.texts import encode
from edge_client.wire.preprocessing import TextSchema
from models.datasets import columns
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out
from models.datasets.token_files.tokenizer_folder import CONFIG, TOKENIZER, read_content, read_object

_SCHEMA = "schema.json"


def load(path: Path, text: str, label: str, length: int, tokenizer: Path, seed: int) -> Dataset:
    """The rows of a table; a fifth of each class is held out, by the seed.

    Args:
        text, label: names of the columns.
        length: tokens of a row; longer texts lose their end, but no special token.
        tokenizer: a `tokenizer.json`, or a folder with one. If its model has the same classes, they keep their order.

    Raises:
        DataError: a file is damaged, a column is missing, a cell is empty, or there is only one class; names the place.
    """
    table = columns.read(path)
    texts, labels = table.cells(text, "the text"), table.cells(label, "the label")
    for column, cells, what in ((text, texts, "a text"), (label, labels, "a class")):
        if "" in cells:
            raise DataError(f"{table.at(cells.index(''), column)}: is empty, expected {what}")
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    classes = _ordered(sorted(set(labels)), folder)
    if len(classes) < 2:
        raise DataError(f"{path}: column {quoted(label)} has one class only, {quoted(classes[0])}")
    content = read_content(folder / TOKENIZER if tokenizer.is_dir() else tokenizer)
    schema = TextSchema("tokenizer", "class", tokenizer=content)
    y = np.array([classes.index(each) for each in labels], np.int32)
    return Dataset(
        name=path.stem,
        x=encode(texts, schema, length, str(path))[0],
        y=y,
        test=held_out(y, seed),
        classes=len(classes),
        class_names=tuple(classes),
        text=schema,
        notes=(
            f"Texts are cut to {length} tokens of {tokenizer}; id {schema.padding} is padding.",
            "20 % of each class is held out, by the seed.",
        ),
    )


def _ordered(classes: Sequence[str], folder: Path) -> list[str]:
    """The classes in the order of the folder's model, if it has the same."""
    for name, key in ((_SCHEMA, "classes"), (CONFIG, "id2label")):
        known: Any = read_object(folder / name).get(key)
        if isinstance(known, dict):
            known = [known.get(str(index)) for index in range(len(known))]
        if isinstance(known, list) and Counter(map(str, known)) == Counter(classes):
            return list(map(str, known))
    return list(classes)
